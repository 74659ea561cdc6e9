// Activation functions of sixteen numbers, for rows.inl and for products that apply one as they end.

ATTAR_INLINE Floats activated(Activation kind, Floats x) {
    const Floats one = all(1.0f);
    switch (kind) {
        case Activation::relu: return max(all(0.0f), x);  // in this order NaN stays
        case Activation::silu: return x / (one + exp(all(0.0f) - x));
        case Activation::gelu_tanh: {  // 0.5 x (1 + tanh y) = x / (1 + e^-2y)
            const Floats y = x * fma(x * x, all(0.044715f), one) * all(1.5957691216057308f);  // 2 sqrt(2 / pi)
            return x / (one + exp(all(0.0f) - y));
        }
        case Activation::quick_gelu: return x / (one + exp(all(-1.702f) * x));
        case Activation::gelu: break;
    }
    float lane[16];
    store(lane, x);
    for (float& value : lane) value = 0.5f * value * (1.0f + std::erf(value * 0.70710678118654752f));
    return load(lane);
}
