// Attention of a decoding step: one query per sequence and head over the key-value cache. Shape letters: decoder.h.

#pragma once

#include <limits>
#include <vector>

#include "decoder.h"
#include "tiles.h"

namespace {

// A line as `plus_products` reads it.
#ifdef __AVX512BF16__
struct PairLine {
    __m512bh pairs;
};
template <class Number>
using QueryLine = std::conditional_t<std::is_same_v<Number, float>, Wide, PairLine>;
inline PairLine query_line(const bf16* from) { return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(from))}; }
inline Floats plus_products(Floats sums, PairLine query, const bf16* key, int64_t real) {
    const __m512i numbers = _mm512_maskz_loadu_epi16(first(real), key);
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(numbers), query.pairs);
}
#else
template <class Number>
using QueryLine = Wide;
inline Wide query_line(const bf16* from) { return load(from); }
#endif
inline Wide query_line(const float* from) { return load(from); }

// sums + the products of a query's line and a key's, of which `real` exist.
template <class Number>
[[gnu::always_inline]] inline Floats plus_products(Floats sums, const Wide& query, const Number* key, int64_t real) {
    const Wide numbers = load_some(key, real);
    unrolled<PARTS>([&](auto i) { sums += query.part[i] * numbers.part[i]; });
    return sums;
}

// A query or key [H]: normed if there is a weight, rotated if there are tables.
template <class Number>
void norm_and_rotate(const Decoder& model, const Number* from, const float* weight, const Number* cos, const Number* sin,
                     Number* to) {
    const int64_t H = model.H, half = H / 2;
    float scale = 1;
    if (weight) {
        Wide squares = all(0);
        for (int64_t i = 0; i < H; i += LINE) squares = squares + load_some(from + i, H - i) * load_some(from + i, H - i);
        scale = 1 / std::sqrt(sum(squares) / static_cast<float>(H) + static_cast<float>(model.eps));
    }
    const auto normed = [&](int64_t i, int64_t real) {
        Wide x = load_some(from + i, real);
        if (!weight) return x;
        alignas(CACHE_LINE) Number rounded[LINE];  // as PyTorch's norm rounds
        store(rounded, x * all(scale) * load_some(weight + i, real));
        return load(rounded);
    };
    if (!cos) {
        for (int64_t i = 0; i < H; i += LINE) store_some(to + i, normed(i, H - i), H - i);
        return;
    }
    const auto table = [&](const Number* numbers, int64_t i, int64_t real) { return load_some(numbers + i, real); };
    for (int64_t i = 0; i < half; i += LINE) {
        const int64_t real = half - i;
        const Wide low = normed(i, real), high = normed(i + half, real);
        store_some(to + i, low * table(cos, i, real) + high * table(sin, i, real), real);
        store_some(to + i + half, high * table(cos, i + half, real) + low * table(sin, i + half, real), real);
    }
}

template <class Number>
inline void prefetch_row(const Number* row, int64_t H) {
    for (int64_t i = 0; i < H; i += CACHE_LINE / static_cast<int64_t>(sizeof(Number))) __builtin_prefetch(row + i);
}

// softmax(q Kᵀ / √H) V of one query over `count` keys, into `to` [H]; q is padded with zeros to whole lines. Values are
// prefetched while keys are read, and `next`, the keys that the thread reads after these, while values are. `scores` has
// room for LANES more than `count`.
template <class Number, int LINES, bool WHOLE>
void attend(const Number* q, const Number* keys, const Number* values, int64_t H, int64_t count, const Number* next,
            float* scores, Wide to[LINES]) {
    const auto real = [&](int64_t i) { return WHOLE ? LINE : H - i * LINE; };
    QueryLine<Number> query[LINES];
    unrolled<LINES>([&](auto i) { query[i] = query_line(q + LINE * i); });
    const float scale = 1 / std::sqrt(static_cast<float>(H));
    const Floats lowest = all_lanes(std::numeric_limits<float>::lowest());
    Floats tops = lowest;
    for (int64_t s = 0; s < count; s += LANES) {
        Floats dots[LANES];
        unrolled<LANES>([&](auto j) {
            const int64_t key = std::min(s + j, count - 1);
            dots[j] = Floats{};
            unrolled<LINES>([&](auto i) { dots[j] = plus_products(dots[j], query[i], keys + key * H + LINE * i, real(i)); });
            prefetch_row(values + key * H, H);
        });
        const Floats some = lane_numbers() < static_cast<int32_t>(std::min(count - s, LANES)) ? sums_of(dots) * scale : lowest;
        store_lanes(scores + s, some);
        tops = tops > some ? tops : some;
    }
    const float top = largest(tops);
    Floats totals{};
    for (int64_t s = 0; s < count; s += LANES) {
        const Floats weights = exponential(load_lanes(scores + s) - top);  // 0 beyond the last
        store_lanes(scores + s, weights);
        totals += weights;
    }
    const Wide inverse = all(1 / sum(totals));
    constexpr int TOGETHER = LANES == 16 ? LINES : std::min(LINES, 2);  // lines whose sums fit the registers
    for (int64_t begin = 0; begin < LINES; begin += TOGETHER) {
        Wide sums[TOGETHER];
        unrolled<TOGETHER>([&](auto i) { sums[i] = all(0); });
        for (int64_t s = 0; s < count; ++s) {
            if (begin == 0) prefetch_row(next + s * H, H);
            const Wide weight = all(scores[s]);
            unrolled<TOGETHER>([&](auto i) {
                if (begin + i < LINES)
                    sums[i] = sums[i] + weight * load_some(values + s * H + (begin + i) * LINE, real(begin + i));
            });
        }
        unrolled<TOGETHER>([&](auto i) {
            if (begin + i < LINES) to[begin + i] = sums[i] * inverse;
        });
    }
}

// Attention of the key-value heads in `pairs` (b · G + g): new keys and values enter the cache; the query heads' results
// go to `attended`, panels of N · H columns.
template <class Number, int LINES, bool WHOLE>
void attend_pairs(const Decoder& model, const Step& step, const Layer& layer, int64_t number, const Number* qkv,
                  Share pairs, std::vector<float>& scores, char* attended) {
    const int64_t N = model.N, G = model.G, H = model.H, C = step.C, group = N / G, E = (N + 2 * G) * H;
    alignas(CACHE_LINE) Number q[LINES * LINE] = {};
    for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
        const int64_t b = pair / G, g = pair % G;
        const Number* token = qkv + b * E;
        const Number* cos = step.cos ? static_cast<const Number*>(step.cos) + b * H : nullptr;
        const Number* sin = step.cos ? static_cast<const Number*>(step.sin) + b * H : nullptr;
        const int64_t start = ((number * step.slots + b) * G + g) * C, column = step.columns_B[b];
        const int64_t begin = layer.window ? std::max<int64_t>(0, column + 1 - layer.window) : 0, count = column + 1 - begin;
        Number* keys = static_cast<Number*>(step.keys) + start * H;
        Number* values = static_cast<Number*>(step.values) + start * H;
        norm_and_rotate(model, token + (N + g) * H, layer.key_norm, cos, sin, keys + column * H);
        std::copy_n(token + (N + G + g) * H, H, values + column * H);
        for (int64_t n = g * group; n < (g + 1) * group; ++n) {
            norm_and_rotate(model, token + n * H, layer.query_norm, cos, sin, q);
            Wide result[LINES];
            const Number* next = n + 1 < (g + 1) * group ? keys : keys + C * H;
            attend<Number, LINES, WHOLE>(q, keys + begin * H, values + begin * H, H, count, next + begin * H, scores.data(), result);
            // A head may begin and end within a panel's step.
            alignas(CACHE_LINE) Number numbers[LINES * LINE];
            for (int i = 0; i < LINES; ++i) store(numbers + LINE * i, result[i]);
            for (int64_t h = 0; h < H;) {
                const int64_t at = n * H + h, some = std::min(PANEL - at % PANEL, H - h);
                std::copy_n(numbers + h, some, packed_at<Number>(attended, N * H, b, at));
                h += some;
            }
        }
    }
}

template <class Number>
using AttendPairs = decltype(&attend_pairs<Number, 1, true>);

// Heads of up to 256 numbers.
template <class Number, int LINES = 1>
AttendPairs<Number> attend_pairs_of(int64_t H) {
    if constexpr (LINES > 8) {
        return nullptr;
    } else {
        if (H == LINES * LINE) return attend_pairs<Number, LINES, true>;
        if (H < LINES * LINE) return attend_pairs<Number, LINES, false>;
        return attend_pairs_of<Number, LINES == 4 ? 8 : LINES + 1>(H);
    }
}

}  // namespace
