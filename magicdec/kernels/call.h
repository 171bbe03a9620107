// A call of attention: mirrored in attention/cpp.py, which has the contract.
#pragma once

#include <cstdint>
#include <memory>

extern "C" {

// Entries as codes, all contiguous, in half precision where nothing else is said: attention/codes.py has the layout.
struct Codes {
    const uint8_t *k, *v;               // (B, K, N, 16 x C), N tiles of 16 slots
    const void *k_scales, *v_scales;    // (B, K, S' / token_group, 2, D), (B, K, N, D / feature_group, 2, 16)
    const int32_t* first_exact;         // (B): slots before it are read as codes
    int64_t slots, bits, token_group, feature_group;  // S'; the groups are multiples of 16, as the bytes of an entry are
};

// Strides are in elements.
struct Call {
    const void *q, *k, *v;
    void* out;  // (B, T, H, D), contiguous
    const int32_t* seqlens;
    const int64_t* indices;  // (B, K, N), contiguous; null: every slot
    const bool* counted;     // (B, T), contiguous: whose attention the scores sum; null: every token's
    const int32_t* positions;  // (B, K, S), contiguous: where the window finds each slot; null: in its place
    float* scores;           // (B, K, S), contiguous; null: none are asked for
    const Codes* codes;      // null: all entries are exact. Without indices, positions and scores
    const int64_t* cache_rows;  // (B): the row of every tensor but q, out and counted that each row reads; null: its own
    int64_t rows, new_tokens, kv_heads, group, dim, slots, num_indices, window, threads;
    int64_t q_row, q_token, q_head, k_row, k_head, k_slot, v_row, v_head, v_slot;
    const float* sinks;  // (H): a logit that takes its share of a query head's softmax, and adds nothing; null: none
    double softcap;      // that scores approach: c tanh(s / c); 0: none
};

}

struct bfloat16;

// A call of attention in a parallel region of the caller's: one thread prepares it, all threads do their share.
struct Attending {
    virtual ~Attending() = default;
    virtual void share() = 0;
};

std::unique_ptr<Attending> attending(const Call& call, const float*);
std::unique_ptr<Attending> attending(const Call& call, const bfloat16*);
