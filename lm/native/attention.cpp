// Attention of whole sequences and its gradient on a CPU, in bf16 or fp32: softmax(scale · Q Kᵀ) V, one
// panel of queries at a time, so that scores never leave a core's caches. lm/native/kernels.py says what the functions compute.
//
// The gradient recomputes the weights from the scores and each query's ln Σ exp (arXiv 2205.14135, appendix B.2):
//     P = exp(scale · S - total),  dV = Pᵀ dY,  dS = P ∘ (dY Vᵀ - rowsum(dY ∘ Y)) · scale,  dQ = dS K,  dK = dSᵀ Q.
//
// Shape letters: B rows, T queries, S keys, N heads, G key-value heads, H head dim.

#include <limits>
#include <vector>

#include "pack.h"

namespace {

struct Attention {
    int64_t B, T, S, N, G, H;
    const bool* mask;     // [B or 1, T, S], true = may attend; null = causal
    int64_t mask_stride;  // from one row's mask to the next; 0 if all rows share one
    float scale;

    int64_t depth() const { return ceil_div(H, PANEL); }  // panels that a head is wide
    int64_t key_panels() const { return ceil_div(S, PANEL); }
    int64_t query_panels() const { return ceil_div(T, PANEL); }

    // Which of 32 keys a query attends to, one bit each.
    uint32_t seen(int64_t b, int64_t t, int64_t key) const {
        if (t >= T) return 0;
        const int64_t count = std::clamp<int64_t>((mask ? S : t + 1 + S - T) - key, 0, PANEL);
        const uint32_t real = count == PANEL ? ~0u : (1u << count) - 1;
        if (!mask || !real) return real;
        bool flags[PANEL] = {};
        std::memcpy(flags, mask + b * mask_stride + t * S + key, count);
        uint32_t bits = 0;
        for (int64_t i = 0; i < PANEL; ++i) bits |= static_cast<uint32_t>(flags[i]) << i;
        return bits;
    }

    // Whether any query of a panel attends to any key of another panel.
    bool any(int64_t b, int64_t query, int64_t key) const {
        for (int64_t t = query; t < std::min(T, query + PANEL); ++t)
            if (seen(b, t, key)) return true;
        return false;
    }
};

// Packs the transpose of a matrix [count, H] as B.
template <class Number>
void pack_transposed(const Attention& a, const Number* from, int64_t count, char* rows, char* panels) {
    pack_a(from, a.H, count, a.H, rows);
    a_to_b<Number>(rows, ceil_div(count, PANEL) * a.depth() * 2, panels);
}

template <class Number>
class Forward {
    static constexpr int64_t STEP = PANEL_STEP<Number>;

  public:
    explicit Forward(const Attention& attention)
        : a(attention), depth(a.depth()), keys(a.key_panels()), rows(buffer(std::max(a.query_panels(), keys) * depth * STEP)),
          key_columns(buffer(keys * depth * STEP)), values(buffer(keys * depth * STEP)), weights(buffer(keys * STEP)),
          scores(buffer(keys * PANEL * PANEL * sizeof(float))), is_seen(keys) {}

    // Sets the keys and values [S, H] of the heads that follow.
    void take(const Number* k, const Number* v) {
        pack_transposed(a, k, a.S, rows.get(), key_columns.get());
        pack_b(v, a.H, a.S, a.H, values.get());
    }

    // y [T, ., H] of one head, whose rows lie N H numbers apart.
    void run(int64_t b, const Number* q, Number* y, float* totals) {
        pack_a(q, a.H, a.T, a.H, rows.get());
        for (int64_t query = 0; query < a.T; query += PANEL) {
            const int64_t num_rows = std::min(PANEL, a.T - query);
            const int64_t end = score(b, query);
            alignas(CACHE_LINE) float sums[PANEL * PANEL];
            float inverse[PANEL];
            for (int64_t r = 0; r < num_rows; ++r) inverse[r] = weigh(b, query, r, end, totals);
            for (int64_t p = 0; p < depth; ++p) {
                gemm_microkernel<Number>(weights.get(), values.get() + p * keys * STEP, std::min(a.S, end * PANEL), false, sums, nullptr, NR, num_rows, a.H - p * PANEL);
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
            gemm_microkernel<Number>(rows.get() + query / PANEL * depth * STEP, key_columns.get() + j * depth * STEP, a.H, false,
                                     scores_of(0) + j * PANEL, nullptr, keys * PANEL, std::min(PANEL, a.T - query));
        }
        return end;
    }

    // A query's weights, not yet divided by their sum; returns 1 / sum.
    float weigh(int64_t b, int64_t query, int64_t r, int64_t end, float* totals) {
        const float* own = scores_of(r);
        constexpr float lowest = -std::numeric_limits<float>::infinity();
        Wide top = all(lowest), total = all(0);
        for (int64_t j = 0; j < end; ++j) {
            const uint32_t bits = is_seen[j] ? a.seen(b, query + r, j * PANEL) : 0;
            if (bits) top = largest(top, chosen(bits, load(own + j * PANEL), lowest));
        }
        const float highest = largest(top);
        for (int64_t j = 0; j < end; ++j) {
            const uint32_t bits = is_seen[j] ? a.seen(b, query + r, j * PANEL) : 0;
            const Wide weight = chosen(bits, exponential((load(own + j * PANEL) - all(highest)) * all(a.scale)), 0);
            total = total + weight;
            store(packed_at<Number>(weights.get(), keys * PANEL, r, j * PANEL), weight);
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

template <class Number>
class Backward {
    static constexpr int64_t STEP = PANEL_STEP<Number>;
    static constexpr int64_t CHUNK = 4;  // panels of queries whose parts of the keys' gradients are added in one product

  public:
    explicit Backward(const Attention& attention)
        : a(attention), depth(a.depth()), keys(a.key_panels()), queries(a.query_panels()),
          rows(buffer(std::max(queries, keys) * depth * STEP)), key_columns(buffer(keys * depth * STEP)),
          value_columns(buffer(keys * depth * STEP)), key_rows(buffer(keys * depth * STEP)),
          query_columns(buffer(queries * depth * STEP)), gradient_rows(buffer(queries * depth * STEP)),
          gradient_columns(buffer(queries * depth * STEP)), slopes(buffer(keys * STEP)),
          weights_across(buffer(keys * CHUNK * STEP)), slopes_across(buffer(keys * CHUNK * STEP)),
          space(buffer(transpose_bytes<Number>(CHUNK * STEP))), viewers(keys), key_sums(keys * PANEL * depth * PANEL),
          value_sums(keys * PANEL * depth * PANEL) {}

    void take(const Number* k, const Number* v) {
        pack_transposed(a, k, a.S, rows.get(), key_columns.get());
        pack_transposed(a, v, a.S, rows.get(), value_columns.get());
        pack_b(k, a.H, a.S, a.H, key_rows.get());
        std::fill(key_sums.begin(), key_sums.end(), 0.0f);
        std::fill(value_sums.begin(), value_sums.end(), 0.0f);
    }

    // The queries' gradient of one head; its part of the keys' and values' gradients is added to their sums.
    void run(int64_t b, const Number* q, const Number* y, const Number* y_gradient, const float* totals,
             Number* q_gradient) {
        pack_a(q, a.H, a.T, a.H, rows.get());
        pack_b(q, a.H, a.T, a.H, query_columns.get());
        pack_a(y_gradient, a.N * a.H, a.T, a.H, gradient_rows.get());
        pack_b(y_gradient, a.N * a.H, a.T, a.H, gradient_columns.get());
        for (int64_t first = 0; first < queries; first += CHUNK) {
            const int64_t end = std::min(queries, first + CHUNK);
            std::fill(viewers.begin(), viewers.end(), Share{end, end});
            for (int64_t i = first; i < end; ++i) run_panel(b, i, y, y_gradient, totals, q_gradient);
            for (int64_t j = 0; j < keys; ++j) {
                add(weights_across, j, gradient_columns, value_sums);
                add(slopes_across, j, query_columns, key_sums);
            }
        }
    }

    void give(Number* k_gradient, Number* v_gradient) {
        for (int64_t s = 0; s < a.S; ++s)
            for (int64_t h = 0; h < a.H; h += PANEL) {
                store_some(k_gradient + s * a.H + h, load(key_sums.data() + s * depth * PANEL + h), a.H - h);
                store_some(v_gradient + s * a.H + h, load(value_sums.data() + s * depth * PANEL + h), a.H - h);
            }
    }

  private:
    // The gradient of panel i of queries.
    void run_panel(int64_t b, int64_t i, const Number* y, const Number* y_gradient, const float* totals,
                   Number* q_gradient) {
        const int64_t query = i * PANEL, num_rows = std::min(PANEL, a.T - query);
        float means[PANEL] = {}, own_totals[PANEL] = {};
        for (int64_t r = 0; r < num_rows; ++r) {
            const int64_t at = (query + r) * a.N * a.H;
            for (int64_t h = 0; h < a.H; h += PANEL)
                means[r] += sum(load_some(y + at + h, a.H - h) * load_some(y_gradient + at + h, a.H - h));
            own_totals[r] = totals[query + r];
        }
        int64_t end = 0;
        for (int64_t j = 0; j < keys; ++j) {
            const int64_t at = (j * CHUNK + i % CHUNK) * STEP;
            if (a.any(b, query, j * PANEL)) {
                end = j + 1;
                viewers[j] = {std::min(viewers[j].begin, i), i + 1};
                block(b, query, j, means, own_totals, weights_across.get() + at, slopes_across.get() + at);
                continue;
            }
            std::fill_n(slopes.get() + j * STEP, STEP, 0);
            if (viewers[j].begin < i) {  // a later panel of the chunk may attend to these keys again
                std::fill_n(weights_across.get() + at, STEP, 0);
                std::fill_n(slopes_across.get() + at, STEP, 0);
            }
        }
        alignas(CACHE_LINE) float sums[PANEL * PANEL];
        for (int64_t p = 0; p < depth; ++p) {
            gemm_microkernel<Number>(slopes.get(), key_rows.get() + p * keys * STEP, std::min(a.S, end * PANEL), false, sums,
                                     nullptr, NR, num_rows, a.H - p * PANEL);
            for (int64_t r = 0; r < num_rows; ++r)
                store_some(q_gradient + (query + r) * a.H + p * PANEL, load(sums + r * PANEL), a.H - p * PANEL);
        }
    }

    // 32 queries with 32 keys: their weights and slopes, packed across the queries.
    void block(int64_t b, int64_t query, int64_t j, const float* means, const float* totals, char* weights_to,
               char* slopes_to) {
        alignas(CACHE_LINE) float scores[PANEL * PANEL], products[PANEL * PANEL];
        alignas(CACHE_LINE) Number weights[PANEL * PANEL], own_slopes[PANEL * PANEL];
        const int64_t i = query / PANEL;
        gemm_microkernel<Number>(rows.get() + i * depth * STEP, key_columns.get() + j * depth * STEP, a.H, false, scores);
        gemm_microkernel<Number>(gradient_rows.get() + i * depth * STEP, value_columns.get() + j * depth * STEP, a.H, false,
                                 products);
        for (int64_t r = 0; r < PANEL; ++r) {
            const uint32_t bits = a.seen(b, query + r, j * PANEL);
            const Wide weight = chosen(bits, exponential(load(scores + r * PANEL) * all(a.scale) - all(totals[r])), 0);
            const Wide slope = weight * (load(products + r * PANEL) - all(means[r])) * all(a.scale);
            store(weights + r * PANEL, weight);
            store(own_slopes + r * PANEL, slope);
            store(packed_at<Number>(slopes.get(), keys * PANEL, r, j * PANEL), slope);
        }
        pack_b_step(weights, PANEL, weights_to);
        pack_b_step(own_slopes, PANEL, slopes_to);
    }

    // sums of 32 keys [32, H] += the transpose of a chunk's numbers [queries, 32 keys] times columns [queries, H].
    void add(const Buffer& across, int64_t j, const Buffer& columns, std::vector<float>& sums) {
        const auto [begin, end] = viewers[j];
        if (begin == end) return;
        const char* numbers = left_operand<Number>(across.get() + (j * CHUNK + begin % CHUNK) * STEP, (end - begin) * 2,
                                                   space.get());
        for (int64_t p = 0; p < depth; ++p)
            gemm_microkernel<Number, Order::COLUMNS>(numbers, columns.get() + (p * queries + begin) * STEP,
                                                     (end - begin) * KC, true,
                                                     sums.data() + (j * depth * PANEL + p) * PANEL, nullptr,
                                                     depth * PANEL, MR, a.H - p * PANEL);
    }

    const Attention& a;
    const int64_t depth, keys, queries;
    Buffer rows, key_columns, value_columns, key_rows, query_columns, gradient_rows, gradient_columns, slopes;
    Buffer weights_across, slopes_across, space;
    // Per panel of keys: the chunk's panels of queries from the first to the last that attend to it.
    std::vector<Share> viewers;
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

template <class Number>
void run(const Attention& a, const Number* q_BNTH, const Number* k_BGSH, const Number* v_BGSH, Number* y_BTNH, float* totals_BNT) {
    const int64_t T = a.T, S = a.S, N = a.N, H = a.H;
    by_group<Forward<Number>>(a, [&](Forward<Number>& forward, int64_t b, int64_t bg, int64_t begin, int64_t end) {
        forward.take(k_BGSH + bg * S * H, v_BGSH + bg * S * H);
        for (int64_t n = begin; n < end; ++n)
            forward.run(b, q_BNTH + (b * N + n) * T * H, y_BTNH + (b * T * N + n) * H, totals_BNT + (b * N + n) * T);
    });
}

template <class Number>
void run_backward(const Attention& a, const Number* y_gradient_BTNH, const Number* q_BNTH, const Number* k_BGSH,
                  const Number* v_BGSH, const Number* y_BTNH, const float* totals_BNT, Number* q_gradient,
                  Number* k_gradient, Number* v_gradient) {
    const int64_t T = a.T, S = a.S, N = a.N, H = a.H;
    by_group<Backward<Number>>(a, [&](Backward<Number>& backward, int64_t b, int64_t bg, int64_t begin, int64_t end) {
        backward.take(k_BGSH + bg * S * H, v_BGSH + bg * S * H);
        for (int64_t n = begin; n < end; ++n) {
            const int64_t at = (b * N + n) * T * H, rows = (b * T * N + n) * H;
            backward.run(b, q_BNTH + at, y_BTNH + rows, y_gradient_BTNH + rows, totals_BNT + (b * N + n) * T,
                         q_gradient + at);
        }
        backward.give(k_gradient + bg * S * H, v_gradient + bg * S * H);
    });
}

template <class Number>
const Number* cast(const void* data) { return static_cast<const Number*>(data); }
template <class Number>
Number* cast(void* data) { return static_cast<Number*>(data); }

// Calls f with a function that casts pointers to the numbers' type.
void by_type(bool is_bf16, auto f) {
    is_bf16 ? f([](auto* data) { return cast<bf16>(data); }) : f([](auto* data) { return cast<float>(data); });
}

}  // namespace

extern "C" {

void attend(const void* q_BNTH, bool is_bf16, const void* k_BGSH, const void* v_BGSH, const bool* mask, int64_t mask_stride,
            void* y_BTNH, float* totals_BNT, int64_t B, int64_t T, int64_t S, int64_t N, int64_t G, int64_t H, float scale) {
    const Attention a{B, T, S, N, G, H, mask, mask_stride, scale};
    by_type(is_bf16, [&](auto typed) {
        run(a, typed(q_BNTH), typed(k_BGSH), typed(v_BGSH), typed(y_BTNH), totals_BNT);
    });
}

void attend_backward(const void* y_gradient_BTNH, bool is_bf16, const void* q_BNTH, const void* k_BGSH, const void* v_BGSH,
                     const void* y_BTNH, const float* totals_BNT, const bool* mask, int64_t mask_stride, void* q_gradient,
                     void* k_gradient, void* v_gradient, int64_t B, int64_t T, int64_t S, int64_t N, int64_t G, int64_t H,
                     float scale) {
    const Attention a{B, T, S, N, G, H, mask, mask_stride, scale};
    by_type(is_bf16, [&](auto typed) {
        run_backward(a, typed(y_gradient_BTNH), typed(q_BNTH), typed(k_BGSH), typed(v_BGSH), typed(y_BTNH), totals_BNT,
                     typed(q_gradient), typed(k_gradient), typed(v_gradient));
    });
}

}  // extern "C"
