// Vectors of fp32 numbers, in GCC's and Clang's own extension: the compiler maps them onto what the machine has.
// A source that includes this may define LANES before, the numbers in a vector; it is as wide as the registers otherwise.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifndef LANES
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#endif

struct bfloat16 {
    uint16_t bits;
};

struct float16 {
    uint16_t bits;
};

// Whether the processor multiplies numbers in bf16 without widening them, and adds the products up in fp32.
#if defined(__AVX512BF16__) && defined(__AVX512VL__) && LANES == 16
#define BF16_PRODUCTS 1
#else
#define BF16_PRODUCTS 0
#endif

namespace {

constexpr int STEP = 8;  // head dims are multiples of it
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();  // the score of a slot that is not seen

inline int64_t whole_vectors(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef float Vec8 __attribute__((vector_size(32)));
typedef uint32_t Pairs __attribute__((vector_size(4 * LANES)));  // of numbers in bf16; the first has the lower bits
typedef uint32_t Pairs8 __attribute__((vector_size(32)));
typedef float Quad __attribute__((vector_size(16)));

template <typename V>
constexpr bool IN_PAIRS = std::is_same_v<V, Pairs> || std::is_same_v<V, Pairs8>;

template <typename V>
constexpr int NUMBERS = sizeof(V) / (IN_PAIRS<V> ? sizeof(bfloat16) : sizeof(float));

// A vector V of the numbers X that are multiplied: of fp32, or as many bytes of pairs.
template <typename X, typename V = Vec>
using Factors = std::conditional_t<std::is_same_v<X, bfloat16>, std::conditional_t<std::is_same_v<V, Vec>, Pairs, Pairs8>, V>;

// The bits of as many numbers as V has, in fp32 and in bf16.
template <typename V>
struct Bits {
    typedef uint32_t Wide __attribute__((vector_size(sizeof(V))));
    typedef uint16_t Narrow __attribute__((vector_size(sizeof(V) / 2)));
};

// Whole numbers in 32 bits. GCC takes twice as many instructions for its own conversion, or goes number by number.
template <typename V>
inline typename Bits<V>::Wide widened(const typename Bits<V>::Narrow& bits) {
#ifdef __AVX512F__
    if constexpr (sizeof(V) == 64) return reinterpret_cast<typename Bits<V>::Wide>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(bits)));
#endif
#ifdef __AVX2__
    if constexpr (sizeof(V) == 32) return reinterpret_cast<typename Bits<V>::Wide>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(bits)));
#endif
    return __builtin_convertvector(bits, typename Bits<V>::Wide);
}

// Room for numbers whose vectors do not cross cache lines. It keeps its memory: fresh pages cost more than small work.
class Room {
  public:
    float* of(int64_t size) {
        if (int64_t(memory.size()) < size + 16) memory.resize(size + 16);
        return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    }

  private:
    std::vector<float> memory;
};

// A vector in memory. GCC copies 64 bytes as two halves, and a load of both waits until they have been written.
template <typename V>
struct __attribute__((packed, may_alias)) Lying {
    V vector;
};

template <typename V = Vec>
inline V load(const float* from) {
    return reinterpret_cast<const Lying<V>*>(from)->vector;
}

template <typename V>
inline typename Bits<V>::Wide load_bits(const bfloat16* from) {
    typename Bits<V>::Narrow bits;
    std::memcpy(&bits, from, sizeof bits);
    return widened<V>(bits);
}

template <typename V = Vec>
inline V load(const bfloat16* from) {
    if constexpr (IN_PAIRS<V>) return reinterpret_cast<const volatile Lying<V>*>(from)->vector;  // as `hold` does
    else return reinterpret_cast<V>(load_bits<V>(from) << 16);
}

// Not every compiler has a type for these. Their exponent has 5 bits, all of which are set where it is not finite.
template <typename V = Vec>
inline V load(const float16* from) {
    typename Bits<V>::Narrow bits;
    std::memcpy(&bits, from, sizeof bits);
#ifdef __AVX512F__
    if constexpr (sizeof(V) == 64) return reinterpret_cast<V>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(bits)));
#endif
#ifdef __F16C__
    if constexpr (sizeof(V) == 32) return reinterpret_cast<V>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(bits)));
#endif
    const auto wide = widened<V>(bits), magnitude = (wide & 0x7fff) << 13;
    const auto finite = reinterpret_cast<typename Bits<V>::Wide>(reinterpret_cast<V>(magnitude) * 0x1p112f);
    const auto exact = (wide & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : finite;
    return reinterpret_cast<V>(exact | (wide & 0x8000) << 16);
}

// A load that stays in its register: compilers would rather read memory again for each use, and loads are scarce.
template <typename V = Vec>
inline V hold(const float* from) {
    return reinterpret_cast<const volatile Lying<V>*>(from)->vector;
}

template <typename V = Vec>
inline V hold(const bfloat16* from) {
    return load<V>(from);
}

template <typename V>
inline void store(float* to, V x) {
    reinterpret_cast<Lying<V>*>(to)->vector = x;
}

// Numbers rounded to bf16: to nearest, ties to even.
template <typename V>
inline typename Bits<V>::Narrow narrowed(V x) {
#if BF16_PRODUCTS
    if constexpr (std::is_same_v<V, Vec>)
        return reinterpret_cast<typename Bits<V>::Narrow>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
#endif
    const auto bits = reinterpret_cast<typename Bits<V>::Wide>(x);
    const auto rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(rounded, typename Bits<V>::Narrow);
}

template <typename V>
inline void store(bfloat16* to, V x) {
    const auto narrow = narrowed(x);
    std::memcpy(to, &narrow, sizeof narrow);
}

inline Pairs pairs_of(Vec first, Vec second) {
    return widened<Vec>(narrowed(first)) | widened<Vec>(narrowed(second)) << 16;
}

// The first `count` numbers, zeros behind them.
template <typename V = Vec, typename T>
inline V load_first(const T* from, int64_t count) {
    T some[NUMBERS<V>] = {};
    std::memcpy(some, from, count * sizeof(T));
    return load<V>(some);
}

template <typename T>
inline void store_first(T* to, Vec x, int64_t count) {
    T some[LANES];
    store(some, x);
    std::memcpy(to, some, count * sizeof(T));
}

// Calls function(i, load, store) for each vector of `size` numbers, the last one perhaps a part.
template <typename Function>
inline void for_vectors(int64_t size, Function function) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        function(i, [](auto* from) { return load(from); }, [](auto* to, Vec x) { store(to, x); });
    if (i < size)
        function(i, [=](auto* from) { return load_first(from, size - i); },
                 [=](auto* to, Vec x) { store_first(to, x, size - i); });
}

template <typename V = Vec>
inline V all(float x) {
    return x - V{};
}

// A number, or two numbers in bf16, in all lanes.
template <typename V = Vec>
inline V broadcast(const float* from) {
    return all<V>(*from);
}

template <typename V = Pairs>
inline V broadcast(const bfloat16* from) {
    uint32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return pair - V{};
}

template <typename V>
inline V plus_products(V sums, V a, V b) {
    return sums + a * b;
}

#if BF16_PRODUCTS
// Adds the products of two pairs to the sum in their lane.
inline Vec plus_products(Vec sums, Pairs a, Pairs b) {
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums), reinterpret_cast<__m512bh>(a),
                                                  reinterpret_cast<__m512bh>(b)));
}

inline Vec8 plus_products(Vec8 sums, Pairs8 a, Pairs8 b) {
    return reinterpret_cast<Vec8>(_mm256_dpbf16_ps(reinterpret_cast<__m256>(sums), reinterpret_cast<__m256bh>(a),
                                                   reinterpret_cast<__m256bh>(b)));
}
#endif

// e^x for x <= 0, within 2 units in the last place; 0 from -87 down. NaN stays NaN: such a score must not look hidden.
inline Vec exp_vec(Vec x) {
    const Vec clamped = x <= -87.0f ? all(-88.0f) : x;  // 2^-127: its exponent's bits are 0
    const Vec shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: what is left of the fraction is rounded off
    const Vec whole = shifted - 12582912.0f;
    const Vec rest = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts
    Vec p = all(1.9875691500e-4f);  // Cephes' polynomial for expf
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    const IntVec exponent = (__builtin_convertvector(whole, IntVec) + 127) << 23;
    return p * reinterpret_cast<Vec>(exponent);
}

// Scores s under a soft cap: c tanh(s / c), in place.
inline void cap_scores(float* scores, int64_t count, float cap) {
    for_vectors(count, [=](int64_t i, auto load, auto store) {
        const Vec x = load(scores + i) * (-2.0f / cap), below = x > 0.0f ? -x : x;
        const Vec p = exp_vec(below), share = (1.0f - p) / (1.0f + p);  // tanh of |s| / c
        store(scores + i, cap * (x > 0.0f ? -share : share));
    });
}

#if BF16_PRODUCTS
// e^x for x <= 0 in fewer steps: its relative error grows with x, to 1e-6 at -16. 0 from -110 down. NaN stays NaN.
inline Vec exp_short(Vec x) {
    const __m512 power = _mm512_max_ps(_mm512_set1_ps(-200), reinterpret_cast<__m512>(x * 1.44269504f));  // NaN: the second
    const __m512 whole = _mm512_roundscale_ps(power, 0);
    const Vec rest = reinterpret_cast<Vec>(power - whole);
    Vec p = all(1.327647179e-3f);  // 2^rest; these numbers make its greatest relative error the least
    p = p * rest + 9.675541427e-3f;
    p = p * rest + 5.550713275e-2f;
    p = p * rest + 2.402211972e-1f;
    p = p * rest + 6.931469671e-1f;
    p = p * rest + 1.0f;
    return reinterpret_cast<Vec>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), whole));
}
#endif

// e^x for x <= 0, as exactly as X needs it.
template <typename X>
inline Vec exp_as(Vec x) {
#if BF16_PRODUCTS
    if constexpr (std::is_same_v<X, bfloat16>) return exp_short(x);
#endif
    return exp_vec(x);
}

// A number made of all lanes: halves are combined, and halves of these, which takes fewer steps than lane after lane.
template <typename Combine>
inline float combined(Vec x, Combine combine) {
#if LANES == 16
    const Vec8 some = combine(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
                              __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
#else
    const Vec8 some = x;
#endif
    const Quad four = combine(__builtin_shufflevector(some, some, 0, 1, 2, 3), __builtin_shufflevector(some, some, 4, 5, 6, 7));
    const Quad two = combine(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
    return combine(two, __builtin_shufflevector(two, two, 1, 0, 3, 2))[0];
}

inline float sum_of(Vec x) {
    return combined(x, [](auto a, auto b) { return a + b; });
}

inline float max_of(Vec x) {
    return combined(x, [](auto a, auto b) { return a > b ? a : b; });
}

// The sums of four vectors, in their order. Each adds its numbers in the same order, whichever place it has.
inline Quad sums_of(Vec8 a, Vec8 b, Vec8 c, Vec8 d) {
    const auto fold = [](Vec8 x, Vec8 y) {
        return __builtin_shufflevector(x, y, 0, 2, 8, 10, 4, 6, 12, 14) +
               __builtin_shufflevector(x, y, 1, 3, 9, 11, 5, 7, 13, 15);
    };
    const Vec8 sums = fold(fold(a, b), fold(c, d));
    return __builtin_shufflevector(sums, sums, 0, 1, 2, 3) + __builtin_shufflevector(sums, sums, 4, 5, 6, 7);
}

#if LANES == 16
inline Quad sums_of(Vec a, Vec b, Vec c, Vec d) {
    const auto fold = [](Vec x, Vec y) {
        return __builtin_shufflevector(x, y, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
               __builtin_shufflevector(x, y, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    };
    const Vec all_sums = fold(fold(a, b), fold(c, d));
    const Vec8 sums = __builtin_shufflevector(all_sums, all_sums, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(all_sums, all_sums, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(sums, sums, 0, 1, 2, 3) + __builtin_shufflevector(sums, sums, 4, 5, 6, 7);
}
#endif

}  // namespace
