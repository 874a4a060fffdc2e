// Matrices in bf16 as the matrix unit reads them: panels of tiles (tiles.h says what these are), with zeros behind the
// matrix's ends.

#pragma once

#include <memory>
#include <new>

#include "tiles.h"

struct Aligned {
    void operator()(char* data) const { ::operator delete[](data, std::align_val_t(LINE)); }
};
using Buffer = std::unique_ptr<char[], Aligned>;
inline Buffer buffer(int64_t bytes) { return Buffer(static_cast<char*>(::operator new[](bytes, std::align_val_t(LINE)))); }

// A matrix [count, width], whose rows lie `stride` numbers apart, in panels of its rows along its width; zeros behind.
inline void put_rows(const uint16_t* from, int64_t stride, int64_t count, int64_t width, char* panels) {
    const int64_t steps = ceil_div(width, PANEL);
    for (int64_t r = 0; r < ceil_div(count, PANEL) * PANEL; ++r)
        for (int64_t s = 0; s < steps; ++s) {
            const __mmask32 real = r < count ? first(width - s * PANEL) : 0;
            const __m512i numbers = _mm512_maskz_loadu_epi16(real, from + r * stride + s * PANEL);
            _mm512_store_si512(place(panels, steps * PANEL, r, s * PANEL), numbers);
        }
}

// The same matrix in panels of its columns along its rows, as the unit reads what it multiplies with.
inline void put_columns(const uint16_t* from, int64_t stride, int64_t count, int64_t width, char* panels) {
    alignas(LINE) static constexpr uint16_t EVEN_ODD[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                            8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(EVEN_ODD), high = _mm512_add_epi16(low, _mm512_set1_epi16(SIDE));
    const int64_t steps = ceil_div(count, PANEL);
    for (int64_t r = 0; r < steps * PANEL; r += 2)
        for (int64_t p = 0; p < ceil_div(width, PANEL); ++p) {
            const __mmask32 real = first(width - p * PANEL);
            const uint16_t* at = from + r * stride + p * PANEL;
            const __m512i even = _mm512_maskz_loadu_epi16(r < count ? real : 0, at);
            const __m512i odd = _mm512_maskz_loadu_epi16(r + 1 < count ? real : 0, at + stride);
            char* line = panels + (p * steps + r / PANEL) * PAIR + r % PANEL / 2 * LINE;
            _mm512_store_si512(line, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_store_si512(line + TILE, _mm512_permutex2var_epi16(even, high, odd));
        }
}

// Tiles of 16 x 16 pairs, each turned over: panels of rows become panels of columns of the transposed matrix, and back.
inline void turn_tiles(const char* from, int64_t count, char* to) {
    for (int64_t tile = 0; tile < count; ++tile, from += TILE, to += TILE) {
        __m512i v[16], t[16];
        for (int i = 0; i < 16; ++i) v[i] = _mm512_load_si512(from + i * LINE);
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
            t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        }
        for (int i = 0; i < 16; i += 4)
            for (int j = 0; j < 2; ++j) {
                v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
                v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
            }
        for (int j = 0; j < 4; ++j) {
            t[j] = _mm512_shuffle_i32x4(v[j], v[j + 4], 0x88);
            t[j + 4] = _mm512_shuffle_i32x4(v[j], v[j + 4], 0xdd);
            t[j + 8] = _mm512_shuffle_i32x4(v[j + 8], v[j + 12], 0x88);
            t[j + 12] = _mm512_shuffle_i32x4(v[j + 8], v[j + 12], 0xdd);
        }
        for (int j = 0; j < 4; ++j) {
            _mm512_store_si512(to + j * LINE, _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88));
            _mm512_store_si512(to + (j + 4) * LINE, _mm512_shuffle_i32x4(t[j + 4], t[j + 12], 0x88));
            _mm512_store_si512(to + (j + 8) * LINE, _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd));
            _mm512_store_si512(to + (j + 12) * LINE, _mm512_shuffle_i32x4(t[j + 4], t[j + 12], 0xdd));
        }
    }
}
