// Packing: matrices in bf16, rearranged into the order in which the matrix unit reads them; tiles.h multiplies them.
//
// A, row-major [M, K], becomes panels of MR = 32 rows. A panel is a sequence of steps of KC = 32 along k; a step is two
// tiles of 1 KiB, one for the panel's upper 16 rows and one for its lower 16. Rows and columns beyond the matrix are 0.
//
//          k: 0 ... 31   32 ... 63                     in memory, one panel after the other:
//          +-----------+-----------+
//   rows   |  tile 0   |  tile 2   |                   panel 0                          panel 1
//   0-15   |           |           |  panel 0          +--------+--------+--------+--------+--------+--
//          +-----------+-----------+  (MR rows)   ->   | tile 0 | tile 1 | tile 2 | tile 3 | tile 0 | ...
//   16-31  |  tile 1   |  tile 3   |                   +--------+--------+--------+--------+--------+--
//          +-----------+-----------+                    step 0 (k < 32)   step 1 (k < 64)
//   32-47  |  tile 0   |  tile 2   |  panel 1
//          +-----------+-----------+                   a tile of A: row r holds k = 0 ... 31 of row r
//
// B, row-major [K, N], becomes panels of NR = 32 columns in the same way: a step's two tiles are the panel's left and
// right 16 columns. Within a tile pairs of k lie together, since the unit multiplies two at a time ("VNNI" layout):
//
//   a tile of B:   row 0:   b[0][0] b[1][0]   b[0][1] b[1][1]   ...   b[0][15] b[1][15]
//                  row 1:   b[2][0] b[3][0]   b[2][1] b[3][1]   ...   b[2][15] b[3][15]
//                   ...
//                  row 15:  b[30][0] b[31][0]       ...               b[30][15] b[31][15]
//
// A weight W [N, K] is B = Wᵀ. Its packed form is that of A = W with each tile transposed in units of pairs
// (`transpose_tiles`), which is how a matrix is packed across its rows without reading it across them.

#pragma once

#include <memory>
#include <new>

#include "tiles.h"

struct Aligned {
    void operator()(char* data) const { ::operator delete[](data, std::align_val_t(CACHE_LINE)); }
};
using Buffer = std::unique_ptr<char[], Aligned>;
inline Buffer buffer(int64_t bytes) { return Buffer(static_cast<char*>(::operator new[](bytes, std::align_val_t(CACHE_LINE)))); }

// Pack A [count, width], whose rows lie `lda` numbers apart.
inline void pack_a(const uint16_t* from, int64_t lda, int64_t count, int64_t width, char* panels) {
    const int64_t steps = ceil_div(width, PANEL);
    for (int64_t r = 0; r < ceil_div(count, PANEL) * PANEL; ++r)
        for (int64_t s = 0; s < steps; ++s) {
            const __mmask32 real = r < count ? first(width - s * PANEL) : 0;
            const __m512i numbers = _mm512_maskz_loadu_epi16(real, from + r * lda + s * PANEL);
            _mm512_store_si512(packed_at(panels, steps * PANEL, r, s * PANEL), numbers);
        }
}

// Pack B [count, width], whose rows lie `ldb` numbers apart.
inline void pack_b(const uint16_t* from, int64_t ldb, int64_t count, int64_t width, char* panels) {
    alignas(CACHE_LINE) static constexpr uint16_t EVEN_ODD[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                            8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(EVEN_ODD), high = _mm512_add_epi16(low, _mm512_set1_epi16(TILE_ROWS));
    const int64_t steps = ceil_div(count, PANEL);
    for (int64_t r = 0; r < steps * PANEL; r += 2)
        for (int64_t p = 0; p < ceil_div(width, PANEL); ++p) {
            const __mmask32 real = first(width - p * PANEL);
            const uint16_t* at = from + r * ldb + p * PANEL;
            const __m512i even = _mm512_maskz_loadu_epi16(r < count ? real : 0, at);
            const __m512i odd = _mm512_maskz_loadu_epi16(r + 1 < count ? real : 0, at + ldb);
            char* line = panels + (p * steps + r / PANEL) * PANEL_STEP + r % PANEL / 2 * CACHE_LINE;
            _mm512_store_si512(line, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_store_si512(line + TILE_BYTES, _mm512_permutex2var_epi16(even, high, odd));
        }
}

// Transpose tiles of 16 x 16 pairs: packed A becomes its transpose packed as B, and back.
inline void transpose_tiles(const char* from, int64_t count, char* to) {
    for (int64_t tile = 0; tile < count; ++tile, from += TILE_BYTES, to += TILE_BYTES) {
        __m512i v[16], t[16];
        for (int i = 0; i < 16; ++i) v[i] = _mm512_load_si512(from + i * CACHE_LINE);
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
            _mm512_store_si512(to + j * CACHE_LINE, _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88));
            _mm512_store_si512(to + (j + 4) * CACHE_LINE, _mm512_shuffle_i32x4(t[j + 4], t[j + 12], 0x88));
            _mm512_store_si512(to + (j + 8) * CACHE_LINE, _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd));
            _mm512_store_si512(to + (j + 12) * CACHE_LINE, _mm512_shuffle_i32x4(t[j + 4], t[j + 12], 0xdd));
        }
    }
}
