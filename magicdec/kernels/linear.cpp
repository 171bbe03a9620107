// y = x W^T + b for few rows of x. Called from models/operators.py.

#include "matmul.h"

namespace {

template <typename T, typename W>
void linear(const T* x, const W* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int threads) {
    static thread_local Room room;
    const auto* in = factors<W>(x, M * K, room);
    Matmul matmul(M, N, K);
#pragma omp parallel num_threads(threads) if (M * N * K > 1 << 16)
    multiply<T, W>(matmul, in, w, bias, y, N);
}

}  // namespace

#define LINEAR(NAME, T, W)                                                                                            \
    extern "C" void NAME(const T* x, const W* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int64_t threads) { \
        linear(x, w, bias, y, M, N, K, int(threads));                                                                 \
    }
LINEAR(linear_float32_float32, float, float)
LINEAR(linear_float32_bfloat16, float, bfloat16)
LINEAR(linear_bfloat16_bfloat16, bfloat16, bfloat16)
