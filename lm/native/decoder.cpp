// One decoding step of a whole transformer on a CPU, in bf16 or fp32: every sequence reads one token. All
// threads run the same phases, each on its own share, with a barrier between phases, so a step is one parallel region;
// weights and the key-value cache are read from memory once. lm/native/decoder.py has the conditions.
//
// Shape letters: B sequences, D width, N heads, G key-value heads, H head dim, E = (N + 2G) H, M MLP width,
// C columns of the cache, V vocabulary.

#include "decoder.h"

// Each struct's size and its fields' offsets; lm/native/decoder.py compares its own with them.
extern "C" {
extern const int64_t layer_layout[] = {
    sizeof(Layer),           offsetof(Layer, attention_norm), offsetof(Layer, attention_norm_bias),
    offsetof(Layer, qkv),    offsetof(Layer, qkv_bias),       offsetof(Layer, query_norm),
    offsetof(Layer, key_norm), offsetof(Layer, out),          offsetof(Layer, out_bias),
    offsetof(Layer, mlp_norm), offsetof(Layer, mlp_norm_bias), offsetof(Layer, up),
    offsetof(Layer, up_bias), offsetof(Layer, down),          offsetof(Layer, down_bias),
    offsetof(Layer, window),
};
extern const int64_t decoder_layout[] = {
    sizeof(Decoder),            offsetof(Decoder, D),           offsetof(Decoder, N),
    offsetof(Decoder, G),       offsetof(Decoder, H),           offsetof(Decoder, M),
    offsetof(Decoder, V),       offsetof(Decoder, num_layers),  offsetof(Decoder, activation),
    offsetof(Decoder, norm_is_rms), offsetof(Decoder, is_bf16), offsetof(Decoder, eps),
    offsetof(Decoder, layers),  offsetof(Decoder, norm),        offsetof(Decoder, norm_bias),
    offsetof(Decoder, head),
};
extern const int64_t step_layout[] = {
    sizeof(Step),           offsetof(Step, B),      offsetof(Step, slots),  offsetof(Step, C),
    offsetof(Step, columns_B), offsetof(Step, x),     offsetof(Step, keys),   offsetof(Step, values),
    offsetof(Step, logits), offsetof(Step, cos),    offsetof(Step, sin),    offsetof(Step, scratch),
};
}

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "decode_attention.h"
#include "pack.h"

namespace {

// Waiting threads spin for longer than shares usually differ, then yield the core.
class Barrier {
  public:
    void wait(int64_t threads) {
        constexpr int SPINS = 2000;  // some 20 microseconds
        const int now = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now; ++spins)
            spins < SPINS ? pause() : static_cast<void>(sched_yield());
    }

  private:
    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    alignas(CACHE_LINE) std::atomic<int> arrived{0};
    alignas(CACHE_LINE) std::atomic<int> round{0};
};

// A row's norm, packed into panels of D columns.
template <class Number>
void norm(const Decoder& model, const Number* x, const float* weight, const float* bias, int64_t row, char* panels) {
    const int64_t D = model.D;
    const float count = static_cast<float>(D);
    Wide total = all(0), squares = all(0);
    float mean = 0;
    if (!model.norm_is_rms) {
        for (int64_t k = 0; k < D; k += PANEL) total = total + load(x + k);
        mean = sum(total) / count;
    }
    for (int64_t k = 0; k < D; k += PANEL) {
        const Wide part = load(x + k) - all(mean);
        squares = squares + part * part;
    }
    const Wide scale = all(1 / std::sqrt(sum(squares) / count + static_cast<float>(model.eps)));
    for (int64_t k = 0; k < D; k += PANEL) {
        const Wide normed = (load(x + k) - all(mean)) * scale * load(weight + k);
        store(packed_at<Number>(panels, D, row, k), normed + load_or_zero(bias ? bias + k : nullptr));
    }
}

// A row of the MLP's activations, packed into panels of M columns.
template <class Number>
void activate(const Decoder& model, const Number* up, int64_t row, char* panels) {
    const int64_t M = model.M;
    for (int64_t k = 0; k < M; k += PANEL) {
        Wide x = load(up + k);
        switch (model.activation) {
            case SWIGLU:
                x = by_part([&](auto i) { return x.part[i] / (1 + exponential(-x.part[i])); }) * load(up + M + k);
                break;
            case GELU_TANH:
                // x (1 + tanh(u)) / 2 = x sigmoid(2u), u = √(2/π) (x + 0.044715 x³)
                x = by_part([&](auto i) {
                    const Floats v = x.part[i];
                    return v / (1 + exponential(-1.5957691f * (v + 0.044715f * v * v * v)));
                });
                break;
            case RELU2:
                x = largest(x, all(0)) * largest(x, all(0));
                break;
            default:
                x = largest(x, all(0));
        }
        store(packed_at<Number>(panels, M, row, k), x);
    }
}

// Memory of a step that all threads read and write.
template <class Number>
struct Scratch {
    char *normed, *attended, *activated;  // panels
    Number *qkv, *up;                     // rows
    int64_t bytes;

    Scratch(const Decoder& model, int64_t B, char* memory) {
        int64_t used = 0;
        const auto take = [&](int64_t size) {
            char* at = memory + used;
            used += ceil_div(size, CACHE_LINE) * CACHE_LINE;
            return at;
        };
        const auto rows = [&](int64_t width) {
            return reinterpret_cast<Number*>(take(B * width * static_cast<int64_t>(sizeof(Number))));
        };
        normed = take(packed_bytes_of<Number>(B, model.D));
        attended = take(packed_bytes_of<Number>(B, model.N * model.H));
        activated = take(packed_bytes_of<Number>(B, model.M));
        qkv = rows((model.N + 2 * model.G) * model.H);
        up = rows(model.M * (model.activation == SWIGLU ? 2 : 1));
        bytes = used;
    }
};

// What `f` returns for the type of the decoder's numbers: f(Number()).
auto by_type(const Decoder& model, auto f) { return model.is_bf16 ? f(bf16()) : f(float()); }

template <class Number>
void run(const Decoder& model, const Step& step, int64_t thread, int64_t threads, Barrier& barrier) {
    const int64_t B = step.B, D = model.D, heads = model.N * model.H, E = (model.N + 2 * model.G) * model.H;
    const int64_t up_columns = model.M * (model.activation == SWIGLU ? 2 : 1);
    const Scratch<Number> scratch(model, B, step.scratch);
    const AttendPairs<Number> attend_some = attend_pairs_of<Number>(model.H);
    Number* stream = static_cast<Number*>(step.x);
    const Share rows = share(B, thread, threads);
    const auto columns = [&](int64_t count) { return share(ceil_div(count, PANEL), thread, threads); };
    const auto into = [](Number* to, int64_t width) {
        return [=](int64_t row, int64_t column, Wide x, int64_t real) {
            store_some(to + row * width + column, x, real);
        };
    };
    // A branch's result is rounded before it is added, as in PyTorch's own operations.
    const auto add_to_stream = [&](int64_t row, int64_t column, Wide x, int64_t) {
        Number* at = stream + row * D + column;
        alignas(CACHE_LINE) Number branch[PANEL];
        store(branch, x);
        store(at, load(at) + load(branch));
    };
    std::vector<float> scores(step.C + LANES);
    configure();
    for (int64_t number = 0; number < model.num_layers; ++number) {
        const Layer& layer = model.layers[number];
        for (int64_t b = rows.begin; b < rows.end; ++b)
            norm(model, stream + b * D, layer.attention_norm, layer.attention_norm_bias, b, scratch.normed);
        barrier.wait(threads);
        gemm<Number>(scratch.normed, B, D, layer.qkv, layer.qkv_bias, E, columns(E), into(scratch.qkv, E));
        barrier.wait(threads);
        const Share pairs = share(B * model.G, thread, threads);
        attend_some(model, step, layer, number, scratch.qkv, pairs, scores, scratch.attended);
        barrier.wait(threads);
        gemm<Number>(scratch.attended, B, heads, layer.out, layer.out_bias, D, columns(D), add_to_stream);
        barrier.wait(threads);
        for (int64_t b = rows.begin; b < rows.end; ++b)
            norm(model, stream + b * D, layer.mlp_norm, layer.mlp_norm_bias, b, scratch.normed);
        barrier.wait(threads);
        const Share up_share = columns(up_columns);
        gemm<Number>(scratch.normed, B, D, layer.up, layer.up_bias, up_columns, up_share, into(scratch.up, up_columns));
        barrier.wait(threads);
        for (int64_t b = rows.begin; b < rows.end; ++b)
            activate(model, scratch.up + b * up_columns, b, scratch.activated);
        barrier.wait(threads);
        gemm<Number>(scratch.activated, B, model.M, layer.down, layer.down_bias, D, columns(D), add_to_stream);
        barrier.wait(threads);
    }
    for (int64_t b = rows.begin; b < rows.end; ++b)
        norm(model, stream + b * D, model.norm, model.norm_bias, b, scratch.normed);
    barrier.wait(threads);
    gemm<Number>(scratch.normed, B, D, model.head, nullptr, model.V, columns(model.V),
                 into(static_cast<Number*>(step.logits), model.V));
    release();
}

// Packs a weight [columns, K].
template <class Number>
void pack(const Number* weight, int64_t columns, int64_t K, char* panels) {
    const int64_t bytes = packed_bytes_of<Number>(PANEL, K);
#pragma omp parallel
    {
        const Buffer rows = buffer(bytes);
#pragma omp for
        for (int64_t p = 0; p < ceil_div(columns, PANEL); ++p) {
            pack_a(weight + p * PANEL * K, K, std::min(PANEL, columns - p * PANEL), K, rows.get());
            a_to_b<Number>(rows.get(), bytes / TILE_BYTES<Number>, panels + p * bytes);
        }
    }
}

}  // namespace

extern "C" {

// Bytes of a packed weight [columns, K]; K is a multiple of KC.
int64_t packed_bytes(int64_t columns, int64_t K, bool is_bf16) {
    return is_bf16 ? packed_bytes_of<bf16>(columns, K) : packed_bytes_of<float>(columns, K);
}

void pack_weight(const void* weight, int64_t columns, int64_t K, bool is_bf16, char* panels) {
    is_bf16 ? pack(static_cast<const bf16*>(weight), columns, K, panels)
            : pack(static_cast<const float*>(weight), columns, K, panels);
}

int64_t scratch_bytes(const Decoder* model, int64_t B) {
    return by_type(*model, [&](auto number) { return Scratch<decltype(number)>(*model, B, nullptr).bytes; });
}

void decode(const Decoder* model, const Step* step) {
    Barrier barrier;
    by_type(*model, [&](auto number) {
#pragma omp parallel
        run<decltype(number)>(*model, *step, omp_get_thread_num(), omp_get_num_threads(), barrier);
        return 0;
    });
}

}  // extern "C"
