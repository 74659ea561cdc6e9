#include "sample.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "pool.h"

namespace attar {
namespace {

// As in kernels/noise.py, which is the specification.
constexpr std::uint64_t NOISE_KEY = 2;
constexpr int WORDS = 4;

constexpr std::int64_t SERIAL_BELOW = 1 << 12;  // elements; a parallel region costs about as much as this many

struct Block {
    std::uint64_t words[WORDS];
};

Block philox(std::uint64_t index, std::uint64_t block, std::uint64_t seed) {
    std::uint64_t c0 = index, c1 = 0, c2 = block, c3 = 0, k0 = seed, k1 = NOISE_KEY;
    for (int round = 0; round < 10; ++round) {
        const auto low = static_cast<unsigned __int128>(0xD2E7470EE14C6C93) * c0;
        const auto high = static_cast<unsigned __int128>(0xCA5A826395121157) * c2;
        c0 = static_cast<std::uint64_t>(high >> 64) ^ c1 ^ k0;
        c1 = static_cast<std::uint64_t>(high);
        c2 = static_cast<std::uint64_t>(low >> 64) ^ c3 ^ k1;
        c3 = static_cast<std::uint64_t>(low);
        k0 += 0x9E3779B97F4A7C15;
        k1 += 0xBB67AE8584CAA73B;
    }
    return {{c0, c1, c2, c3}};
}

// The natural logarithm of a positive normal number, in this order of operations everywhere: a library's own differs
// from one machine to the next. x = m 2^e with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh((m - 1) / (m + 1)).
double logarithm(double x) {
    std::uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const std::uint64_t shifted = bits - 0x3FE6A09E667F3BCD;  // the bits of sqrt(1/2): its borrow belongs to e
    const auto exponent = static_cast<std::int64_t>(shifted) >> 52;
    bits -= static_cast<std::uint64_t>(exponent) << 52;
    double m;
    std::memcpy(&m, &bits, sizeof m);
    const double s = (m - 1) / (m + 1), z = s * s;
    double sum = 1.0 / 23;
    for (int odd = 21; odd > 0; odd -= 2) sum = sum * z + 1.0 / odd;
    return static_cast<double>(exponent) * 0x1.62e42fefa39efp-1 + 2 * s * sum;
}

double noise(std::uint64_t word) {
    return -logarithm(-logarithm((static_cast<double>(word >> 12) + 0.5) * 0x1p-52));
}

// No noise of a word is larger. u = 1 - (r + 1/2) / 2^52, -log u >= 1 - u and r >= 2^(bits of r - 1): so the noise
// is at most (53 - bits) log 2, and for r = 0 that of the bound is 1 log 2 above.
double bound(std::uint64_t word) {
    const std::uint64_t r = (std::uint64_t{1} << 52) - 1 - (word >> 12);
    const int bits = r ? 64 - __builtin_clzll(r) : 0;
    return (53 - bits) * 0.6931471805599454 + 1e-9;  // rounded up; the sum covers the rounding of all logarithms
}

constexpr double LARGEST = 36.7368005696772 + 1e-9;  // 53 log 2: the noise of the largest word

std::int64_t choose(const double* row, std::int64_t columns, std::uint64_t seed, std::uint64_t index) {
    std::int64_t top = 0;
    for (std::int64_t i = 1; i < columns; ++i)
        if (row[i] > row[top]) top = i;
    std::int64_t best = top;
    double most = row[top] + noise(philox(index, top / WORDS, seed).words[top % WORDS]);
    for (std::int64_t first = 0; first < columns; first += WORDS) {
        const int within = static_cast<int>(columns - first < WORDS ? columns - first : WORDS);
        bool hopeful = false;
        for (int j = 0; j < within; ++j) hopeful |= row[first + j] + LARGEST >= most;
        if (!hopeful) continue;
        const Block block = philox(index, first / WORDS, seed);
        for (int j = 0; j < within; ++j) {
            const double x = row[first + j];
            if (!(x + bound(block.words[j]) >= most)) continue;
            const double sum = x + noise(block.words[j]);
            if (sum > most || (sum == most && first + j < best)) most = sum, best = first + j;
        }
    }
    return best;
}

}  // namespace

void gumbel_max(const double* rows, std::int64_t count, std::int64_t columns, const std::uint64_t* seeds,
                const std::uint64_t* indices, std::int64_t* chosen) {
    if (count < 0 || columns < 1 || count > std::numeric_limits<std::int64_t>::max() / 16 / columns)
        throw std::invalid_argument("impossible shape of rows");
    for_rows(count, count * columns >= SERIAL_BELOW, [&](std::int64_t r) {
        chosen[r] = choose(rows + r * columns, columns, seeds[r], indices[r]);
    });
}

}  // namespace attar
