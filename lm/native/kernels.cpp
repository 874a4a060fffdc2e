// Operations that PyTorch runs on a CPU in several passes over memory, in one pass. Plain loops, which the compiler
// vectorises; numbers are fp32 between load and store. OpenMP distributes rows over threads, one thread per row, and sums
// have a fixed order, so results do not depend on the number of threads. lm/native/kernels.py says what each function computes.
//
// Shape letters: R rows, D width, M MLP width, B batch, T tokens, S keys, N heads, G key-value heads, H head dim,
// V vocabulary.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "numbers.h"

namespace {

// Calls f with the pointer cast to its type: bf16 if `is_bf16`, else fp32.
template <class F>
void typed(const void* data, bool is_bf16, F f) {
    is_bf16 ? f(static_cast<const bf16*>(data)) : f(static_cast<const float*>(data));
}
template <class F>
void typed(void* data, bool is_bf16, F f) {
    is_bf16 ? f(static_cast<bf16*>(data)) : f(static_cast<float*>(data));
}

constexpr int64_t WORTH_THREADS = 1 << 18;  // numbers; below this, waking a thread costs more than it saves

template <class X>
inline float maximum(const X* x, int64_t count) {
    float top = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < count; ++j) top = std::max(top, wide(x[j]));
    return top;
}

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;  // the step of a counter, 2^64 / phi
constexpr int64_t CHUNKS = 64;  // of rows for sums of weight gradients; a fixed number fixes their order

}  // namespace

extern "C" {

// With a branch, x + branch is stored in x's type and normed.
void rms_norm(const void* x_RD, bool x_bf16, const void* branch_RD, const void* weight_D, bool weight_bf16, void* sum_RD,
              void* y_RD, bool y_bf16, float* inverse_R, int64_t R, int64_t D, float eps) {
    typed(x_RD, x_bf16, [&](auto* xs) { typed(weight_D, weight_bf16, [&](auto* weight) { typed(y_RD, y_bf16, [&](auto* ys) {
        using X = std::remove_cvref_t<decltype(*xs)>;
        auto* branches = static_cast<const std::remove_reference_t<decltype(*ys)>*>(branch_RD);
#pragma omp parallel for if (R * D > WORTH_THREADS)
        for (int64_t r = 0; r < R; ++r) {
            const X* x = xs + r * D;
            auto* y = ys + r * D;
            if (branches) {
                const auto* branch = branches + r * D;
                X* sum = static_cast<X*>(sum_RD) + r * D;
#pragma omp simd
                for (int64_t j = 0; j < D; ++j) put(sum[j], wide(x[j]) + wide(branch[j]));
                x = sum;
            }
            float squares = 0;
#pragma omp simd reduction(+ : squares)
            for (int64_t j = 0; j < D; ++j) squares += wide(x[j]) * wide(x[j]);
            const float inverse = 1 / std::sqrt(squares / static_cast<float>(D) + eps);
#pragma omp simd
            for (int64_t j = 0; j < D; ++j) put(y[j], wide(x[j]) * inverse * wide(weight[j]));
            inverse_R[r] = inverse;
        }
    }); }); });
}

// x is what was normed. `carried`, if any, is the gradient that reaches x other than through its norm, and is added. If x
// was a sum, its branch has the same gradient in the branch's type.
void rms_norm_backward(const void* gradient_RD, bool gradient_bf16, const void* x_RD, bool x_bf16, const void* weight_D,
                       bool weight_bf16, const float* inverse_R, const void* carried_RD, void* x_gradient_RD,
                       void* branch_gradient_RD, float* weight_gradient_D, int64_t R, int64_t D) {
    std::vector<float> partial(CHUNKS * D);
    typed(gradient_RD, gradient_bf16, [&](auto* gs) { typed(x_RD, x_bf16, [&](auto* xs) {
    typed(weight_D, weight_bf16, [&](auto* weight) {
        using X = std::remove_cvref_t<decltype(*xs)>;
        using Y = std::remove_cvref_t<decltype(*gs)>;
        auto *outs = static_cast<X*>(x_gradient_RD);
        auto *carrieds = static_cast<const X*>(carried_RD);
        auto *branch_outs = static_cast<Y*>(branch_gradient_RD);
#pragma omp parallel for if (R * D > WORTH_THREADS)
        for (int64_t chunk = 0; chunk < CHUNKS; ++chunk) {
            float* sums = partial.data() + chunk * D;
            for (int64_t r = chunk * R / CHUNKS; r < (chunk + 1) * R / CHUNKS; ++r) {
                const Y* g = gs + r * D;
                const X* x = xs + r * D;
                X* out = outs + r * D;
                const float inverse = inverse_R[r];
                float mean = 0;
#pragma omp simd reduction(+ : mean)
                for (int64_t j = 0; j < D; ++j) mean += wide(g[j]) * wide(weight[j]) * wide(x[j]);
                mean *= inverse / static_cast<float>(D);
#pragma omp simd
                for (int64_t j = 0; j < D; ++j) {
                    const float normed = wide(x[j]) * inverse;
                    put(out[j], (wide(g[j]) * wide(weight[j]) - normed * mean) * inverse);
                    sums[j] += wide(g[j]) * normed;
                }
                // Rounded as separate operations would round.
                if (carrieds) {
                    const X* carried = carrieds + r * D;
#pragma omp simd
                    for (int64_t j = 0; j < D; ++j) put(out[j], wide(out[j]) + wide(carried[j]));
                }
                if (branch_outs) {
                    Y* branch_out = branch_outs + r * D;
#pragma omp simd
                    for (int64_t j = 0; j < D; ++j) put(branch_out[j], wide(out[j]));
                }
            }
        }
    }); }); });
    std::fill(weight_gradient_D, weight_gradient_D + D, 0.0f);
    for (int64_t chunk = 0; chunk < CHUNKS; ++chunk)
        for (int64_t j = 0; j < D; ++j) weight_gradient_D[j] += partial[chunk * D + j];
}

// A row's key starts a counter; each of its values, finalised as in SplitMix64, decides four columns with 16 bits each.
void dropout(const void* x_RD, bool is_bf16, const int64_t* keys_R, void* y_RD, int64_t R, int64_t D, int64_t threshold,
             float scale) {
    typed(x_RD, is_bf16, [&](auto* xs) {
        using X = std::remove_cvref_t<decltype(*xs)>;
        const int16_t first_kept = static_cast<int16_t>(threshold - (1 << 15));
#pragma omp parallel for if (R * D > WORTH_THREADS)
        for (int64_t r = 0; r < R; ++r) {
            const X* x = xs + r * D;
            X* y = static_cast<X*>(y_RD) + r * D;
            uint64_t words[64];
            int16_t bits[256];
            for (int64_t start = 0; start < D; start += 256) {
                const uint64_t first = static_cast<uint64_t>(keys_R[r]) + (start / 4 + 1) * GOLDEN;
#pragma omp simd
                for (int64_t g = 0; g < 64; ++g) {
                    uint64_t z = first + g * GOLDEN;
                    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
                    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
                    words[g] = z ^ (z >> 31);
                }
                std::memcpy(bits, words, sizeof bits);
                const int64_t count = std::min<int64_t>(256, D - start);
#pragma omp simd
                for (int64_t j = 0; j < count; ++j)
                    put(y[start + j], bits[j] < first_kept ? 0.0f : wide(x[start + j]) * scale);
            }
        }
    });
}

void swiglu(const void* x_R2M, bool is_bf16, void* y_RM, int64_t R, int64_t M) {
    typed(x_R2M, is_bf16, [&](auto* xs) {
        using X = std::remove_cvref_t<decltype(*xs)>;
        auto* ys = static_cast<X*>(y_RM);
#pragma omp parallel for if (R * M > WORTH_THREADS)
        for (int64_t r = 0; r < R; ++r) {
            const X *gate = xs + r * 2 * M, *up = gate + M;
            X* y = ys + r * M;
#pragma omp simd
            for (int64_t j = 0; j < M; ++j) {
                const float z = wide(gate[j]);
                put(y[j], z / (1 + exponential(-z)) * wide(up[j]));
            }
        }
    });
}

void swiglu_backward(const void* gradient_RM, const void* x_R2M, bool is_bf16, void* x_gradient_R2M, int64_t R,
                     int64_t M) {
    typed(x_R2M, is_bf16, [&](auto* xs) {
        using X = std::remove_cvref_t<decltype(*xs)>;
        auto* gs = static_cast<const X*>(gradient_RM);
        auto* outs = static_cast<X*>(x_gradient_R2M);
#pragma omp parallel for if (R * M > WORTH_THREADS)
        for (int64_t r = 0; r < R; ++r) {
            const X *g = gs + r * M, *gate = xs + r * 2 * M, *up = gate + M;
            X *gate_out = outs + r * 2 * M, *up_out = gate_out + M;
#pragma omp simd
            for (int64_t j = 0; j < M; ++j) {
                const float z = wide(gate[j]), sigmoid = 1 / (1 + exponential(-z)), silu = z * sigmoid;
                put(up_out[j], wide(g[j]) * silu);
                put(gate_out[j], wide(g[j]) * wide(up[j]) * (sigmoid + silu * (1 - sigmoid)));
            }
        }
    });
}

// With `back` the reverse: from gradients of q, k and v to that of qkv.
void split_heads(void* qkv_BTE, bool is_bf16, const void* cos_BTH, const void* sin_BTH, void* q_BNTH, void* k_BGTH,
                 void* v_BGTH, int64_t B, int64_t T, int64_t N, int64_t G, int64_t H, bool back) {
    typed(qkv_BTE, is_bf16, [&](auto* qkv) {
        using X = std::remove_cvref_t<decltype(*qkv)>;
        const int64_t heads = N + 2 * G, half = H / 2;
#pragma omp parallel for collapse(2) if (B * T * heads * H > WORTH_THREADS)
        for (int64_t b = 0; b < B; ++b)
            for (int64_t t = 0; t < T; ++t) {
                const X* cos = static_cast<const X*>(cos_BTH) + (b * T + t) * H;
                const X* sin = static_cast<const X*>(sin_BTH) + (b * T + t) * H;
                for (int64_t n = 0; n < heads; ++n) {
                    X* whole = qkv + ((b * T + t) * heads + n) * H;
                    void* part = n < N ? q_BNTH : n < N + G ? k_BGTH : v_BGTH;
                    const int64_t count = n < N ? N : G, head = n < N ? n : (n - N) % G;
                    X* own = static_cast<X*>(part) + ((b * count + head) * T + t) * H;
                    const X* from = back ? own : whole;
                    X* to = back ? whole : own;
                    if (n >= N + G || cos_BTH == nullptr) {
                        std::copy(from, from + H, to);
                        continue;
                    }
                    // The transposed rotation has sines of the opposite sign.
                    const float sign = back ? -1.0f : 1.0f;
#pragma omp simd
                    for (int64_t i = 0; i < half; ++i) {
                        const float low = wide(from[i]), high = wide(from[i + half]);
                        put(to[i], low * wide(cos[i]) + sign * high * wide(sin[i]));
                        put(to[i + half], high * wide(cos[i + half]) + sign * low * wide(sin[i + half]));
                    }
                }
            }
    });
}

void token_logprobs(const void* logits_RV, bool is_bf16, const int64_t* tokens_R, float* logprobs_R, float* totals_R,
                    int64_t R, int64_t V, float scale) {
    typed(logits_RV, is_bf16, [&](auto* rows) {
#pragma omp parallel for if (R * V > WORTH_THREADS)
        for (int64_t r = 0; r < R; ++r) {
            const auto* logits = rows + r * V;
            const float top = maximum(logits, V);
            float total = 0;
#pragma omp simd reduction(+ : total)
            for (int64_t j = 0; j < V; ++j) total += exponential((wide(logits[j]) - top) * scale);
            totals_R[r] = top * scale + std::log(total);
            logprobs_R[r] = wide(logits[tokens_R[r]]) * scale - totals_R[r];
        }
    });
}

void token_logprobs_backward(const float* gradient_R, const void* logits_RV, bool is_bf16, const int64_t* tokens_R,
                             const float* totals_R, void* logits_gradient_RV, int64_t R, int64_t V, float scale) {
    typed(logits_RV, is_bf16, [&](auto* rows) {
        using X = std::remove_cvref_t<decltype(*rows)>;
#pragma omp parallel for if (R * V > WORTH_THREADS)
        for (int64_t r = 0; r < R; ++r) {
            const X* logits = rows + r * V;
            X* out = static_cast<X*>(logits_gradient_RV) + r * V;
            const float slope = gradient_R[r] * scale, total = totals_R[r];
#pragma omp simd
            for (int64_t j = 0; j < V; ++j) put(out[j], -slope * exponential(wide(logits[j]) * scale - total));
            const int64_t token = tokens_R[r];
            put(out[token], slope * (1 - exponential(wide(logits[token]) * scale - total)));
        }
    });
}

void sample(const void* logits_RV, bool is_bf16, const float* uniforms_R, float scale, int64_t* tokens_R,
            float* logprobs_R, int64_t R, int64_t V) {
    constexpr int64_t STRIDE = 64;  // tokens whose probabilities are summed before the search
    const int64_t strides = (V + STRIDE - 1) / STRIDE;
    typed(logits_RV, is_bf16, [&](auto* rows) {
#pragma omp parallel if (R * V > WORTH_THREADS)
        {
            std::vector<float> weights(strides * STRIDE), sums(strides);
#pragma omp for
            for (int64_t r = 0; r < R; ++r) {
                const auto* logits = rows + r * V;
                const float top = maximum(logits, V);
#pragma omp simd
                for (int64_t j = 0; j < V; ++j) weights[j] = exponential((wide(logits[j]) - top) * scale);
                double total = 0;
                for (int64_t s = 0; s < strides; ++s) {
                    float sum = 0;
#pragma omp simd reduction(+ : sum)
                    for (int64_t j = 0; j < STRIDE; ++j) sum += weights[s * STRIDE + j];
                    sums[s] = sum;
                    total += sum;
                }
                // Find the stride in which the cumulative sum passes the threshold, then the token. If rounding ends the
                // search late, take the last token with any probability.
                double left = uniforms_R[r] * total;
                int64_t s = 0;
                while (s + 1 < strides && left >= sums[s]) left -= sums[s++];
                int64_t token = s * STRIDE;
                const int64_t end = std::min(V, token + STRIDE);
                while (token + 1 < end && left >= weights[token]) left -= weights[token++];
                while (token > 0 && !(weights[token] > 0)) --token;
                tokens_R[r] = token;
                logprobs_R[r] = (wide(logits[token]) - top) * scale - static_cast<float>(std::log(total));
            }
        }
    });
}

}  // extern "C"
