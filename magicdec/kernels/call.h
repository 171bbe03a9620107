// A call of attention: mirrored in attention/cpp.py, which has the contract.
#pragma once

#include <cstdint>
#include <memory>

extern "C" {

// Strides are in elements.
struct Call {
    const void *q, *k, *v;
    void* out;  // (B, T, H, D), contiguous
    const int32_t* seqlens;
    const int64_t* indices;  // (B, K, N), contiguous; null: every slot
    const bool* counted;     // (B, T), contiguous: whose attention the scores sum; null: every token's
    const int32_t* positions;  // (B, K, S), contiguous: where the window finds each slot; null: in its place
    float* scores;           // (B, K, S), contiguous; null: none are asked for
    int64_t rows, new_tokens, kv_heads, group, dim, slots, num_indices, window, threads;
    int64_t q_row, q_token, q_head, k_row, k_head, k_slot, v_row, v_head, v_slot;
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
