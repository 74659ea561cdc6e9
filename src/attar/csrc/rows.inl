// Kernels of rows.cpp.

#include "activations.inl"

static void norm_row(Norm kind, const float* stream, const float* delta, std::int64_t columns, const float* weight,
                     const float* bias, float eps, float offset, float* sum_out, float* out) {
    const std::int64_t whole = columns / 16 * 16;
    if (delta) {
        std::int64_t i = 0;
        for (; i < whole; i += 16) store(sum_out + i, load(stream + i) + load(delta + i));
        for (; i < columns; ++i) sum_out[i] = stream[i] + delta[i];
        stream = sum_out;
    }
    const float count = static_cast<float>(columns);
    float mean = 0.0f;
    if (kind == Norm::layer) {
        Floats total = all(0.0f);
        for (std::int64_t i = 0; i < whole; i += 16) total = total + load(stream + i);
        mean = sum(total);
        for (std::int64_t i = whole; i < columns; ++i) mean += stream[i];
        mean /= count;
    }
    Floats total = all(0.0f);
    for (std::int64_t i = 0; i < whole; i += 16) {
        const Floats value = load(stream + i) - all(mean);
        total = fma(value, value, total);
    }
    float squares = sum(total);
    for (std::int64_t i = whole; i < columns; ++i) squares = std::fma(stream[i] - mean, stream[i] - mean, squares);
    const float scale = 1.0f / std::sqrt(squares / count + eps);
    for (std::int64_t i = 0; i < whole; i += 16) {
        const Floats value = (load(stream + i) - all(mean)) * all(scale) * (load(weight + i) + all(offset));
        store(out + i, bias ? value + load(bias + i) : value);
    }
    for (std::int64_t i = whole; i < columns; ++i) {
        const float value = (stream[i] - mean) * scale * (weight[i] + offset);
        out[i] = bias ? value + bias[i] : value;
    }
}

template <Activation KIND>
static void activate_row_as(bool gated, const float* x, std::int64_t columns, float* out) {
    const std::int64_t whole = columns / 16 * 16, rest = columns - whole;
    for (std::int64_t i = 0; i < whole; i += 16) {
        const Floats value = activated(KIND, load(x + i));
        store(out + i, gated ? value * load(x + columns + i) : value);
    }
    if (rest) {  // through the same vector code: a column's bits do not depend on where the row ends
        float lane[16] = {}, gate[16] = {};
        std::memcpy(lane, x + whole, static_cast<std::size_t>(rest) * 4);
        if (gated) std::memcpy(gate, x + columns + whole, static_cast<std::size_t>(rest) * 4);
        const Floats value = activated(KIND, load(lane));
        store(lane, gated ? value * load(gate) : value);
        std::memcpy(out + whole, lane, static_cast<std::size_t>(rest) * 4);
    }
}

static void activate_row(Activation kind, bool gated, const float* x, std::int64_t columns, float* out) {
    switch (kind) {
        case Activation::silu: return activate_row_as<Activation::silu>(gated, x, columns, out);
        case Activation::gelu: return activate_row_as<Activation::gelu>(gated, x, columns, out);
        case Activation::gelu_tanh: return activate_row_as<Activation::gelu_tanh>(gated, x, columns, out);
        case Activation::quick_gelu: return activate_row_as<Activation::quick_gelu>(gated, x, columns, out);
        case Activation::relu: return activate_row_as<Activation::relu>(gated, x, columns, out);
    }
}
