// Attention of whole sequences and its gradient on a CPU that multiplies bf16: softmax(scale · Q Kᵀ) V, one
// panel of queries at a time, so that scores never leave a core's caches. lm/native/kernels.py says what the functions compute.
//
// The gradient recomputes the weights from the scores and each query's ln Σ exp (arXiv 2205.14135, appendix B.2):
//     P = exp(scale · S - total),  dV = Pᵀ dY,  dS = P ∘ (dY Vᵀ - rowsum(dY ∘ Y)) · scale,  dQ = dS K,  dK = dSᵀ Q.
//
// Shape letters: B rows, T queries, S keys, N heads, G key-value heads, H head dim.

#include <cstdint>

#ifdef __AVX512BF16__

#include <cmath>
#include <limits>
#include <vector>

#include "pack.h"
#include "tiles.h"

namespace {

struct Attention {
    int64_t B, T, S, N, G, H;
    const bool* mask;     // [B or 1, T, S], true = may attend; null = causal
    int64_t mask_stride;  // from one row's mask to the next; 0 where all have one
    float scale;

    int64_t depth() const { return ceil_div(H, PANEL); }  // panels that a head is wide
    int64_t key_panels() const { return ceil_div(S, PANEL); }
    int64_t query_panels() const { return ceil_div(T, PANEL); }

    // Which of 32 keys a query attends to, one bit each.
    uint32_t seen(int64_t b, int64_t t, int64_t key) const {
        if (t >= T) return 0;
        const uint32_t real = first((mask ? S : t + 1 + S - T) - key);
        if (!mask) return real;
        const __m256i bytes = _mm256_maskz_loadu_epi8(real, mask + b * mask_stride + t * S + key);
        return _mm256_test_epi8_mask(bytes, bytes);
    }

    // Whether any query of a panel attends to any key of another panel.
    bool any(int64_t b, int64_t query, int64_t key) const {
        for (int64_t t = query; t < std::min(T, query + PANEL); ++t)
            if (seen(b, t, key)) return true;
        return false;
    }
};

// e^x for x <= 0 or slightly above, with a relative error below 3e-6.
inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-100.0f));
    const __m512 n = _mm512_roundscale_ps(x * _mm512_set1_ps(1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = (x - n * _mm512_set1_ps(0.693359375f)) + n * _mm512_set1_ps(2.12194440e-4f);
    __m512 series = _mm512_set1_ps(1.0f / 120);
    for (const float coefficient : {1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        series = series * r + _mm512_set1_ps(coefficient);
    return _mm512_scalef_ps(series, n);
}
inline Wide exponential(Wide x) { return {exponential(x.low), exponential(x.high)}; }
inline Wide only(uint32_t bits, Wide x) {
    return {_mm512_maskz_mov_ps(static_cast<__mmask16>(bits), x.low),
            _mm512_maskz_mov_ps(static_cast<__mmask16>(bits >> TILE_ROWS), x.high)};
}

// Packs the transpose of a matrix [count, H] as B.
void pack_transposed(const Attention& a, const uint16_t* from, int64_t count, char* rows, char* panels) {
    pack_a(from, a.H, count, a.H, rows);
    transpose_tiles(rows, ceil_div(count, PANEL) * a.depth() * 2, panels);
}

class Forward {
  public:
    explicit Forward(const Attention& attention)
        : a(attention), depth(a.depth()), keys(a.key_panels()), rows(buffer(std::max(a.query_panels(), keys) * depth * PANEL_STEP)),
          key_columns(buffer(keys * depth * PANEL_STEP)), values(buffer(keys * depth * PANEL_STEP)), weights(buffer(keys * PANEL_STEP)),
          scores(buffer(keys * PANEL * PANEL * sizeof(float))), is_seen(keys) {}

    // Sets the keys and values [S, H] of the heads that follow.
    void take(const uint16_t* k, const uint16_t* v) {
        pack_transposed(a, k, a.S, rows.get(), key_columns.get());
        pack_b(v, a.H, a.S, a.H, values.get());
    }

    // y [T, ., H] of one head, whose rows lie N H numbers apart.
    void run(int64_t b, const uint16_t* q, uint16_t* y, float* totals) {
        pack_a(q, a.H, a.T, a.H, rows.get());
        for (int64_t query = 0; query < a.T; query += PANEL) {
            const int64_t num_rows = std::min(PANEL, a.T - query);
            const int64_t end = score(b, query);
            alignas(CACHE_LINE) float sums[PANEL * PANEL];
            float inverse[PANEL];
            for (int64_t r = 0; r < num_rows; ++r) inverse[r] = weigh(b, query, r, end, totals);
            for (int64_t p = 0; p < depth; ++p) {
                gemm_microkernel(weights.get(), values.get() + p * keys * PANEL_STEP, end, sums, nullptr);
                for (int64_t r = 0; r < num_rows; ++r)
                    store_some(y + (query + r) * a.N * a.H + p * PANEL, load(sums + r * PANEL) * all(inverse[r]),
                               a.H - p * PANEL);
            }
        }
    }

  private:
    // Scores of a panel of queries with all keys that any of them attends to; returns the end of those panels of keys.
    int64_t score(int64_t b, int64_t query) {
        int64_t end = 0;
        for (int64_t j = 0; j < keys; ++j) {
            is_seen[j] = a.any(b, query, j * PANEL);
            if (!is_seen[j]) continue;
            end = j + 1;
            gemm_microkernel(rows.get() + query / PANEL * depth * PANEL_STEP, key_columns.get() + j * depth * PANEL_STEP, depth,
                     scores_of(0) + j * PANEL, nullptr, keys * PANEL);
        }
        return end;
    }

    // A query's weights, not yet divided by their sum; returns 1 / sum.
    float weigh(int64_t b, int64_t query, int64_t r, int64_t end, float* totals) {
        const float* own = scores_of(r);
        Wide top = all(-std::numeric_limits<float>::infinity()), total = all(0);
        for (int64_t j = 0; j < end; ++j) {
            const uint32_t bits = is_seen[j] ? a.seen(b, query + r, j * PANEL) : 0;
            const Wide x = load(own + j * PANEL);
            top.low = _mm512_mask_max_ps(top.low, static_cast<__mmask16>(bits), top.low, x.low);
            top.high = _mm512_mask_max_ps(top.high, static_cast<__mmask16>(bits >> TILE_ROWS), top.high, x.high);
        }
        const float highest = _mm512_reduce_max_ps(_mm512_max_ps(top.low, top.high));
        for (int64_t j = 0; j < end; ++j) {
            const uint32_t bits = is_seen[j] ? a.seen(b, query + r, j * PANEL) : 0;
            const Wide weight = only(bits, exponential((load(own + j * PANEL) - all(highest)) * all(a.scale)));
            total = total + weight;
            store(packed_at(weights.get(), keys * PANEL, r, j * PANEL), weight);
        }
        totals[query + r] = highest * a.scale + std::log(sum(total));
        return 1 / sum(total);
    }

    float* scores_of(int64_t r) { return reinterpret_cast<float*>(scores.get()) + r * keys * PANEL; }

    const Attention& a;
    const int64_t depth, keys;
    Buffer rows, key_columns, values, weights, scores;
    std::vector<char> is_seen;
};

class Backward {
  public:
    explicit Backward(const Attention& attention)
        : a(attention), depth(a.depth()), keys(a.key_panels()), queries(a.query_panels()),
          rows(buffer(std::max(queries, keys) * depth * PANEL_STEP)), key_columns(buffer(keys * depth * PANEL_STEP)),
          value_columns(buffer(keys * depth * PANEL_STEP)), key_rows(buffer(keys * depth * PANEL_STEP)),
          query_columns(buffer(queries * depth * PANEL_STEP)), gradient_rows(buffer(queries * depth * PANEL_STEP)),
          gradient_columns(buffer(queries * depth * PANEL_STEP)), slopes(buffer(keys * PANEL_STEP)),
          key_sums(keys * PANEL * depth * PANEL), value_sums(keys * PANEL * depth * PANEL) {}

    void take(const uint16_t* k, const uint16_t* v) {
        pack_transposed(a, k, a.S, rows.get(), key_columns.get());
        pack_transposed(a, v, a.S, rows.get(), value_columns.get());
        pack_b(k, a.H, a.S, a.H, key_rows.get());
        std::fill(key_sums.begin(), key_sums.end(), 0.0f);
        std::fill(value_sums.begin(), value_sums.end(), 0.0f);
    }

    // The queries' gradient of one head; its part of the keys' and values' gradients is added to their sums.
    void run(int64_t b, const uint16_t* q, const uint16_t* y, const uint16_t* y_gradient, const float* totals,
             uint16_t* q_gradient) {
        pack_a(q, a.H, a.T, a.H, rows.get());
        pack_b(q, a.H, a.T, a.H, query_columns.get());
        pack_a(y_gradient, a.N * a.H, a.T, a.H, gradient_rows.get());
        pack_b(y_gradient, a.N * a.H, a.T, a.H, gradient_columns.get());
        for (int64_t query = 0; query < a.T; query += PANEL) {
            const int64_t num_rows = std::min(PANEL, a.T - query);
            float means[PANEL] = {}, own_totals[PANEL] = {};
            for (int64_t r = 0; r < num_rows; ++r) {
                const int64_t at = (query + r) * a.N * a.H;
                for (int64_t h = 0; h < a.H; h += PANEL)
                    means[r] += sum(load_some(y + at + h, a.H - h) * load_some(y_gradient + at + h, a.H - h));
                own_totals[r] = totals[query + r];
            }
            int64_t end = 0;
            for (int64_t j = 0; j < keys; ++j) {
                if (!a.any(b, query, j * PANEL)) {
                    std::fill_n(slopes.get() + j * PANEL_STEP, PANEL_STEP, 0);
                    continue;
                }
                end = j + 1;
                block(b, query, j, means, own_totals);
            }
            alignas(CACHE_LINE) float sums[PANEL * PANEL];
            for (int64_t p = 0; p < depth; ++p) {
                gemm_microkernel(slopes.get(), key_rows.get() + p * keys * PANEL_STEP, end, sums, nullptr);
                for (int64_t r = 0; r < num_rows; ++r)
                    store_some(q_gradient + (query + r) * a.H + p * PANEL, load(sums + r * PANEL), a.H - p * PANEL);
            }
        }
    }

    void give(uint16_t* k_gradient, uint16_t* v_gradient) {
        for (int64_t s = 0; s < a.S; ++s)
            for (int64_t h = 0; h < a.H; h += PANEL) {
                store_some(k_gradient + s * a.H + h, load(key_sums.data() + s * depth * PANEL + h), a.H - h);
                store_some(v_gradient + s * a.H + h, load(value_sums.data() + s * depth * PANEL + h), a.H - h);
            }
    }

  private:
    // 32 queries with 32 keys.
    void block(int64_t b, int64_t query, int64_t j, const float* means, const float* totals) {
        alignas(CACHE_LINE) float scores[PANEL * PANEL], products[PANEL * PANEL];
        alignas(CACHE_LINE) uint16_t weights[PANEL * PANEL], own_slopes[PANEL * PANEL];
        const int64_t i = query / PANEL;
        gemm_microkernel(rows.get() + i * depth * PANEL_STEP, key_columns.get() + j * depth * PANEL_STEP, depth, scores, nullptr);
        gemm_microkernel(gradient_rows.get() + i * depth * PANEL_STEP, value_columns.get() + j * depth * PANEL_STEP, depth, products, nullptr);
        for (int64_t r = 0; r < PANEL; ++r) {
            const uint32_t bits = a.seen(b, query + r, j * PANEL);
            const Wide weight = only(bits, exponential(load(scores + r * PANEL) * all(a.scale) - all(totals[r])));
            const Wide slope = weight * (load(products + r * PANEL) - all(means[r])) * all(a.scale);
            store(weights + r * PANEL, weight);
            store(own_slopes + r * PANEL, slope);
            store(packed_at(slopes.get(), keys * PANEL, r, j * PANEL), slope);
        }
        add(weights, gradient_columns.get() + i * PANEL_STEP, value_sums.data() + j * PANEL * depth * PANEL);
        add(own_slopes, query_columns.get() + i * PANEL_STEP, key_sums.data() + j * PANEL * depth * PANEL);
    }

    // sums [32 keys, H] += the transpose of [32 queries, 32 keys] times columns [32 queries, H].
    void add(const uint16_t* numbers, const char* columns, float* sums) {
        alignas(CACHE_LINE) char pairs[PANEL_STEP], turned[PANEL_STEP];
        pack_b(numbers, PANEL, PANEL, PANEL, pairs);
        transpose_tiles(pairs, 2, turned);
        for (int64_t p = 0; p < depth; ++p)
            gemm_microkernel<1>(turned, columns + p * queries * PANEL_STEP, 1, sums + p * PANEL, nullptr, depth * PANEL);
    }

    const Attention& a;
    const int64_t depth, keys, queries;
    Buffer rows, key_columns, value_columns, key_rows, query_columns, gradient_rows, gradient_columns, slopes;
    std::vector<float> key_sums, value_sums;
};

// Every pair of a row and a key-value head, with the N / G query heads that share it. One thread runs those in order, so
// that sums have one order: f(worker, b, bg, first head, end).
template <class Worker, class F>
void by_group(const Attention& a, F f) {
    const int64_t shared = a.N / a.G;
#pragma omp parallel
    {
        configure();
        Worker worker(a);
#pragma omp for
        for (int64_t bg = 0; bg < a.B * a.G; ++bg) f(worker, bg / a.G, bg, bg % a.G * shared, (bg % a.G + 1) * shared);
        release();
    }
}

}  // namespace

extern "C" {

void attend(const uint16_t* q_BNTH, const uint16_t* k_BGSH, const uint16_t* v_BGSH, const bool* mask, int64_t mask_stride,
            uint16_t* y_BTNH, float* totals_BNT, int64_t B, int64_t T, int64_t S, int64_t N, int64_t G, int64_t H,
            float scale) {
    const Attention a{B, T, S, N, G, H, mask, mask_stride, scale};
    by_group<Forward>(a, [&](Forward& forward, int64_t b, int64_t bg, int64_t begin, int64_t end) {
        forward.take(k_BGSH + bg * S * H, v_BGSH + bg * S * H);
        for (int64_t n = begin; n < end; ++n)
            forward.run(b, q_BNTH + (b * N + n) * T * H, y_BTNH + (b * T * N + n) * H, totals_BNT + (b * N + n) * T);
    });
}

void attend_backward(const uint16_t* y_gradient_BTNH, const uint16_t* q_BNTH, const uint16_t* k_BGSH,
                     const uint16_t* v_BGSH, const uint16_t* y_BTNH, const float* totals_BNT, const bool* mask,
                     int64_t mask_stride, uint16_t* q_gradient, uint16_t* k_gradient, uint16_t* v_gradient, int64_t B,
                     int64_t T, int64_t S, int64_t N, int64_t G, int64_t H, float scale) {
    const Attention a{B, T, S, N, G, H, mask, mask_stride, scale};
    by_group<Backward>(a, [&](Backward& backward, int64_t b, int64_t bg, int64_t begin, int64_t end) {
        backward.take(k_BGSH + bg * S * H, v_BGSH + bg * S * H);
        for (int64_t n = begin; n < end; ++n) {
            const int64_t at = (b * N + n) * T * H, rows = (b * T * N + n) * H;
            backward.run(b, q_BNTH + at, y_BTNH + rows, y_gradient_BTNH + rows, totals_BNT + (b * N + n) * T,
                         q_gradient + at);
        }
        backward.give(k_gradient + bg * S * H, v_gradient + bg * S * H);
    });
}

}  // extern "C"

#endif
