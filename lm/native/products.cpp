// The gradient of a linear map's weight, dW = dYᵀ X, by a CPU's matrix unit (Intel AMX): both operands are bf16 and lie
// across the sum, over the tokens, which is what libraries are slow at; dW is fp32, as it is summed.
//
// A panel of 32 of dY's columns over DEPTH tokens fits the first cache, and stays there while columns of X pass. The sums
// of a block of W's rows stay in the second until all tokens have been added.
//
// Shape letters: R tokens, F rows of W (outputs), D columns of W (inputs).

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <omp.h>

#include "panels.h"

namespace {

constexpr int64_t DEPTH = 256;    // tokens
constexpr int64_t BLOCK = 8;      // panels of W's rows
constexpr int64_t COLUMNS = 512;  // of X

// dW's rows of one panel of dY, over some tokens and columns.
void panel_gradient(const char* rows, const char* columns, int64_t steps, bool adds, float* out, int64_t D,
                    int64_t num_rows, int64_t num_columns) {
    if (num_rows >= PANEL && num_columns >= PANEL) {
        adds ? multiply<true>(rows, columns, steps, out, nullptr, D) : multiply(rows, columns, steps, out, nullptr, D);
        return;
    }
    alignas(LINE) float sums[PANEL * PANEL];
    multiply(rows, columns, steps, sums, nullptr);
    for (int64_t r = 0; r < std::min(PANEL, num_rows); ++r)
        for (int64_t c = 0; c < std::min(PANEL, num_columns); ++c)
            out[r * D + c] = (adds ? out[r * D + c] : 0) + sums[r * PANEL + c];
}

}  // namespace

extern "C" {

void weight_gradient(const uint16_t* gradient_RF, const uint16_t* x_RD, float* out_FD, int64_t R, int64_t F, int64_t D) {
    const int64_t steps = ceil_div(R, PANEL), panels = ceil_div(F, PANEL);
    const Buffer columns = buffer(steps * ceil_div(std::min(COLUMNS, D), PANEL) * PAIR);
#pragma omp parallel
    {
        configure();
        const Buffer across = buffer(BLOCK * DEPTH * PANEL * 2), rows = buffer(BLOCK * DEPTH * PANEL * 2);
        const Share own = share(panels, omp_get_thread_num(), omp_get_num_threads());
        for (int64_t d = 0; d < D; d += COLUMNS) {
            const int64_t num_columns = ceil_div(std::min(COLUMNS, D - d), PANEL);
#pragma omp for
            for (int64_t p = 0; p < num_columns; ++p) {
                const int64_t column = d + p * PANEL;
                put_columns(x_RD + column, D, R, std::min(PANEL, D - column), columns.get() + p * steps * PAIR);
            }
            for (int64_t begin = own.begin; begin < own.end; begin += BLOCK)
                for (int64_t r = 0; r < R; r += DEPTH) {
                    const int64_t end = std::min(own.end, begin + BLOCK);
                    const int64_t count = std::min(DEPTH, R - r), deep = ceil_div(count, PANEL);
                    const int64_t width = std::min(F, end * PANEL) - begin * PANEL;
                    put_columns(gradient_RF + r * F + begin * PANEL, F, count, width, across.get());
                    turn_tiles(across.get(), (end - begin) * deep * 2, rows.get());
                    for (int64_t panel = begin; panel < end; ++panel)
                        for (int64_t p = 0; p < num_columns; ++p) {
                            const int64_t f = panel * PANEL, column = d + p * PANEL;
                            panel_gradient(rows.get() + (panel - begin) * deep * PAIR,
                                           columns.get() + (p * steps + r / PANEL) * PAIR, deep, r > 0,
                                           out_FD + f * D + column, D, F - f, D - column);
                        }
                }
#pragma omp barrier  // before the next columns are put where these are
        }
        _tile_release();
    }
}

}  // extern "C"

#endif
