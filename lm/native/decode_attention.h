// Attention of a decoding step: one query per sequence and head over the key-value cache. Shape letters: decoder.h.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "decoder.h"
#include "numbers.h"
#include "tiles.h"

namespace {

// A query or key [H]: normed if there is a weight, rotated if there are tables.
void norm_and_rotate(const Decoder& model, const uint16_t* from, const float* weight, const uint16_t* cos, const uint16_t* sin,
          uint16_t* to) {
    const int64_t H = model.H, half = H / 2;
    float scale = 1;
    if (weight) {
        Wide squares = all(0);
        for (int64_t i = 0; i < H; i += PANEL) squares = squares + load(from + i) * load(from + i);
        scale = 1 / std::sqrt(sum(squares) / static_cast<float>(H) + static_cast<float>(model.eps));
    }
    const auto normed = [&](int64_t i) {
        const __m512 x = load16(from + i);
        return weight ? round16(x * _mm512_set1_ps(scale) * _mm512_loadu_ps(weight + i)) : x;
    };
    for (int64_t i = 0; i < half; i += TILE_ROWS) {
        const __m512 low = normed(i), high = normed(i + half);
        store16(to + i, cos ? low * load16(cos + i) + high * load16(sin + i) : low);
        store16(to + i + half, cos ? high * load16(cos + i + half) + low * load16(sin + i + half) : high);
    }
}

// The sums of 16 vectors, as one vector.
inline __m512 sums_of(__m512 v[16]) {
    for (int i = 0; i < 16; i += 2) v[i] = _mm512_unpacklo_ps(v[i], v[i + 1]) + _mm512_unpackhi_ps(v[i], v[i + 1]);
    for (int i = 0; i < 16; i += 4) {
        const __m512d a = _mm512_castps_pd(v[i]), b = _mm512_castps_pd(v[i + 2]);
        v[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
    const auto fold = [](__m512 a, __m512 b) {
        return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    };
    return fold(fold(v[0], v[4]), fold(v[8], v[12]));
}

inline void prefetch_row(const uint16_t* row, int64_t H) {
    for (int64_t i = 0; i < H; i += CACHE_LINE / 2) _mm_prefetch(row + i, _MM_HINT_T0);
}

// softmax(q Kᵀ / √H) V of one query over `count` keys, into `to` [H]. Values are prefetched while keys are read, and
// `next`, the keys that the thread reads after these, while values are. `scores` has room for 16 more than `count`.
template <int LINES>
void attend(const uint16_t* q, const uint16_t* keys, const uint16_t* values, int64_t count, const uint16_t* next,
            float* scores, Wide to[LINES]) {
    constexpr int64_t H = LINES * 32;
    const auto numbers = [](const uint16_t* from) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from)); };
    __m512bh query[LINES];
    for (int i = 0; i < LINES; ++i) query[i] = numbers(q + 32 * i);
    const __m512 scale = _mm512_set1_ps(1 / std::sqrt(static_cast<float>(H)));
    const __m512 lowest = _mm512_set1_ps(std::numeric_limits<float>::lowest());
    __m512 tops = lowest;
    for (int64_t s = 0; s < count; s += 16) {
        __m512 dots[16];
        for (int64_t j = 0; j < 16; ++j) {
            const int64_t key = std::min(s + j, count - 1);
            dots[j] = _mm512_setzero_ps();
            for (int i = 0; i < LINES; ++i)
                dots[j] = _mm512_dpbf16_ps(dots[j], numbers(keys + key * H + 32 * i), query[i]);
            prefetch_row(values + key * H, H);
        }
        const __mmask16 real = count - s >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count - s)) - 1);
        const __m512 some = _mm512_mask_mov_ps(lowest, real, sums_of(dots) * scale);
        _mm512_storeu_ps(scores + s, some);
        tops = _mm512_max_ps(tops, some);
    }
    const float top = _mm512_reduce_max_ps(tops);
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t s = 0; s < count; ++s) total += scores[s] = exponential(scores[s] - top);
    for (int i = 0; i < LINES; ++i) to[i] = all(0);
    for (int64_t s = 0; s < count; ++s) {
        prefetch_row(next + s * H, H);
        const Wide weight = all(scores[s]);
        for (int i = 0; i < LINES; ++i) to[i] = to[i] + weight * load(values + s * H + 32 * i);
    }
    for (int i = 0; i < LINES; ++i) to[i] = to[i] * all(1 / total);
}

// Attention of the key-value heads in `pairs` (b · G + g): new keys and values enter the cache; the query heads' results
// are packed into panels of N · H columns.
template <int LINES>
void attend_pairs(const Decoder& model, const Step& step, const Layer& layer, int64_t number, const uint16_t* qkv,
                  Share pairs, std::vector<float>& scores, char* panels) {
    const int64_t N = model.N, G = model.G, H = model.H, C = step.C, group = N / G, E = (N + 2 * G) * H;
    alignas(CACHE_LINE) uint16_t q[LINES * 32];
    for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
        const int64_t b = pair / G, g = pair % G;
        const uint16_t* token = qkv + b * E;
        const uint16_t* cos = step.cos ? step.cos + b * H : nullptr;
        const uint16_t* sin = step.cos ? step.sin + b * H : nullptr;
        const int64_t start = ((number * step.slots + b) * G + g) * C, column = step.columns_B[b];
        const int64_t first = layer.window ? std::max<int64_t>(0, column + 1 - layer.window) : 0, count = column + 1 - first;
        uint16_t* keys = step.keys + start * H;
        uint16_t* values = step.values + start * H;
        norm_and_rotate(model, token + (N + g) * H, layer.key_norm, cos, sin, keys + column * H);
        std::copy_n(token + (N + G + g) * H, H, values + column * H);
        for (int64_t n = g * group; n < (g + 1) * group; ++n) {
            norm_and_rotate(model, token + n * H, layer.query_norm, cos, sin, q);
            Wide result[LINES];
            const uint16_t* next = n + 1 < (g + 1) * group ? keys : keys + C * H;
            attend<LINES>(q, keys + first * H, values + first * H, count, next + first * H, scores.data(), result);
            for (int i = 0; i < LINES; ++i) store(packed_at(panels, N * H, b, n * H + 32 * i), result[i]);
        }
    }
}

using AttendPairs = decltype(&attend_pairs<1>);

AttendPairs attend_pairs_of(int64_t head_dim) {
    switch (head_dim) {
        case 32: return attend_pairs<1>;
        case 64: return attend_pairs<2>;
        case 96: return attend_pairs<3>;
        case 128: return attend_pairs<4>;
        case 256: return attend_pairs<8>;
        default: return nullptr;
    }
}

}  // namespace
