// Reading ahead at an even pace: memory must not wait for arithmetic, and many cache lines at once would keep the
// arithmetic waiting, because a core fetches only about a dozen at a time.
#pragma once

#include <algorithm>
#include <cstdint>

namespace {

// The cache lines that a piece of work fetches in each of its steps while it computes.
struct Ahead {
    const char* from;
    int64_t lines;
    void step() {
        for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(from + i * 64);
        from += lines * 64;
    }
};

// The cache lines that are read next, which work fetches a few at a time.
struct Stream {
    const char* from;
    int64_t lines;
    Ahead take(int64_t some, int64_t steps) {
        const Ahead taken{from, (std::min(some, lines) + steps - 1) / steps};
        from += taken.lines * steps * 64;
        lines = std::max<int64_t>(0, lines - taken.lines * steps);
        return taken;
    }
};

}  // namespace
