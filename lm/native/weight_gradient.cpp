// The gradient of a linear map's weight, dW = dYᵀ X, on a CPU. Both operands are bf16 and
// row-major along the outer dimensions, not along the sum over tokens, which BLAS libraries are slow at. dW is fp32.
//
// Blocking: each panel of X is read once per BLOCK packed panels of dYᵀ over `depth` tokens. The sizes for the matrix unit keep
// a panel in the first cache, and the sums of BLOCK panels by `width` columns in the second. Those for vectors are larger,
// because loading and storing sums and packing dY again cost more than reading past a cache (Zen 5, 1 MiB of second cache).
//
// Shape letters: R tokens, F rows of W (outputs), D columns of W (inputs).

#include <cstdint>

#include <omp.h>

#include "pack.h"

namespace {

constexpr int64_t STEP = PANEL_STEP<bf16>;
constexpr int64_t BLOCK = 8;  // panels of W's rows
// `depth` in tokens and `width` in columns of X.
constexpr int64_t TILE_DEPTH = 256, VECTOR_DEPTH = 1024, TILE_WIDTH = 512, VECTOR_WIDTH = 2048;

// C [MR, NR] = A B + beta C for one block of dW, of which `num_rows` and `num_columns` exist; beta is 0 or 1.
void gemm_block(const char* a_panel, const char* b_panel, int64_t num_steps, bool beta, float* c, int64_t ldc,
                int64_t num_rows, int64_t num_columns) {
    if (num_rows >= MR && num_columns >= NR) {
        gemm_microkernel<bf16, Order::COLUMNS>(a_panel, b_panel, num_steps * KC, beta, c, nullptr, ldc);
        return;
    }
    alignas(CACHE_LINE) float sums[MR * NR];
    gemm_microkernel<bf16, Order::COLUMNS>(a_panel, b_panel, num_steps * KC, false, sums);
    for (int64_t i = 0; i < std::min(MR, num_rows); ++i)
        for (int64_t j = 0; j < std::min(NR, num_columns); ++j)
            c[i * ldc + j] = (beta ? c[i * ldc + j] : 0) + sums[i * NR + j];
}

}  // namespace

extern "C" {

void weight_gradient(const bf16* gradient_RF, const bf16* x_RD, float* out_FD, int64_t R, int64_t F, int64_t D) {
    const int64_t steps = ceil_div(R, PANEL), panels = ceil_div(F, PANEL), panel_bytes = steps * STEP;
    const int64_t depth = std::min(steps * PANEL, matrix_unit_runs() ? TILE_DEPTH : VECTOR_DEPTH);
    const int64_t width = matrix_unit_runs() ? TILE_WIDTH : VECTOR_WIDTH;
    const Buffer columns = buffer(ceil_div(std::min(width, D), PANEL) * panel_bytes);
#pragma omp parallel
    {
        configure();
        const int64_t block_bytes = BLOCK * depth / PANEL * STEP;
        const Buffer across = buffer(block_bytes), space = buffer(transpose_bytes<bf16>(block_bytes));
        const Share own = share(panels, omp_get_thread_num(), omp_get_num_threads());
        for (int64_t d = 0; d < D; d += width) {
            const int64_t num_columns = std::min(width, D - d);
#pragma omp for
            for (int64_t s = 0; s < steps; ++s)
                pack_b(x_RD + s * PANEL * D + d, D, std::min(PANEL, R - s * PANEL), num_columns, columns.get() + s * STEP,
                       panel_bytes);
            for (int64_t begin = own.begin; begin < own.end; begin += BLOCK)
                for (int64_t r = 0; r < R; r += depth) {
                    const int64_t end = std::min(own.end, begin + BLOCK);
                    const int64_t count = std::min(depth, R - r), deep = ceil_div(count, PANEL);
                    pack_b(gradient_RF + r * F + begin * PANEL, F, count, std::min(F, end * PANEL) - begin * PANEL,
                           across.get());
                    const char* rows = left_operand<bf16>(across.get(), (end - begin) * deep * 2, space.get());
                    for (int64_t p = 0; p < ceil_div(num_columns, PANEL); ++p)
                        for (int64_t panel = begin; panel < end; ++panel) {
                            const int64_t f = panel * PANEL, column = d + p * PANEL;
                            gemm_block(rows + (panel - begin) * deep * STEP,
                                       columns.get() + p * panel_bytes + r / PANEL * STEP, deep, r > 0,
                                       out_FD + f * D + column, D, F - f, D - column);
                        }
                }
#pragma omp barrier  // before the next columns of X overwrite these
        }
        release();
    }
}

}  // extern "C"
