// Every kernel at every level of the machine that runs this, beside the portable one: they must agree to the bit. A program
// of its own, without Python, so that it can be built for another processor and run under an emulator (check_neon.sh);
// what is right is the business of tests/kernels/, this asks only whether the levels are the same.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../src/attar/csrc/attention.h"
#include "../src/attar/csrc/cpu.h"
#include "../src/attar/csrc/limits.h"
#include "../src/attar/csrc/linear.h"
#include "../src/attar/csrc/matrix.h"
#include "../src/attar/csrc/quantize.h"
#include "../src/attar/csrc/rows.h"

namespace {

using Bytes = std::vector<std::uint8_t>;
using Run = std::function<Bytes(attar::Level)>;

std::uint64_t state = 1;
std::uint32_t random_bits() {  // Knuth's MMIX generator: its upper half is random enough
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>(state >> 32);
}

std::vector<float> random_floats(std::int64_t count) {
    std::vector<float> out(static_cast<std::size_t>(count));
    for (float& each : out) each = static_cast<float>(static_cast<std::int32_t>(random_bits())) * 0x1p-30f;
    return out;
}

template <class T>
std::vector<T> random_numbers(std::int64_t count, std::uint32_t most) {
    std::vector<T> out(static_cast<std::size_t>(count));
    for (T& each : out) each = static_cast<T>(random_bits() % (most + 1));
    return out;
}

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
    Bytes out(values.size() * sizeof(T));
    std::memcpy(out.data(), values.data(), out.size());
    return out;
}

std::vector<float> poisoned(std::int64_t count) { return std::vector<float>(static_cast<std::size_t>(count), NAN); }

int checks = 0, failures = 0;

void compare(const std::string& what, const Run& run) {
    const Bytes expected = run(attar::Level::portable);
    for (const std::string& name : attar::levels()) {
        ++checks;
        if (run(attar::level_of(name)) == expected) continue;
        ++failures;
        std::printf("%s: %s differs from portable\n", what.c_str(), name.c_str());
    }
}

void check_products(const attar::Factors& factors, const std::string& what) {
    for (const std::int64_t rows : {1, 3, 6, 17, 40}) {
        const std::vector<float> x = random_floats(rows * factors.columns);
        compare(what + ", rows " + std::to_string(rows), [&](attar::Level level) {
            const std::int64_t before = attar::many_rows(level);
            std::vector<float> few = poisoned(rows * factors.width), many = few;
            attar::set_many_rows(level, std::int64_t{1} << 40);
            attar::linear(factors, x.data(), rows, few.data(), level);
            attar::set_many_rows(level, 0);
            attar::linear(factors, x.data(), rows, many.data(), level);
            attar::set_many_rows(level, before);
            if (std::memcmp(few.data(), many.data(), few.size() * 4) != 0) {
                ++failures;
                std::printf("%s: the paths for few and for many rows differ\n", what.c_str());
            }
            return bytes_of(few);
        });
    }
}

attar::Factors factors_of(std::shared_ptr<attar::Matrix> matrix, const float* bias, bool integer, std::int64_t group) {
    attar::Factors out;
    out.factors.push_back({matrix, bias, 0});
    out.columns = matrix->columns, out.width = matrix->rows, out.integer = integer, out.activation_group = group;
    out.wide = integer && group > 0;
    out.check();
    return out;
}

void check_linear() {
    constexpr std::int64_t OUTPUTS = 100;
    const auto arena = std::make_shared<attar::Arena>();
    const std::vector<float> bias = random_floats(OUTPUTS);
    for (int bits = 2; bits <= 8; ++bits)
        for (const std::int64_t group : {32, 64, 0})
            for (const bool symmetric : {true, false}) {
                const std::int64_t columns = group ? 192 : 131, groups = group ? columns / group : 1;
                const auto codes = random_numbers<std::uint32_t>(OUTPUTS * ((columns * bits + 31) / 32), 0xfffffffe);
                const auto scales = random_numbers<std::uint16_t>(OUTPUTS * groups, 0x3bff);  // float16 below 1
                auto zeros = random_numbers<std::int8_t>(OUTPUTS * groups, (1u << bits) - 1);
                for (std::int8_t& each : zeros) each = static_cast<std::int8_t>(each - (1 << (bits - 1)));
                const auto matrix = attar::pack_codes(arena, codes.data(), false, OUTPUTS, columns, bits,
                                                      group ? group : columns, scales.data(), attar::Number::float16,
                                                      symmetric ? nullptr : zeros.data());
                const std::string what = "w" + std::to_string(bits) + "g" + std::to_string(group);
                check_products(factors_of(matrix, bias.data(), true, 0), what + ", int8 rows");
                if (group) check_products(factors_of(matrix, nullptr, true, 32), what + ", int8g32 rows");
                check_products(factors_of(matrix, bias.data(), false, 0), what + ", exact rows");
                attar::Factors gated = factors_of(matrix, nullptr, true, 0);
                gated.factors.push_back({matrix, bias.data(), 0});
                gated.gate = std::make_shared<attar::Activation>(attar::Activation::silu);
                gated.check();
                check_products(gated, what + ", gated");
            }
    for (const attar::Number number : {attar::Number::float32, attar::Number::float16, attar::Number::bfloat16}) {
        const auto halves = random_numbers<std::uint16_t>(OUTPUTS * 77, 0x3bff);
        const std::vector<float> floats = random_floats(OUTPUTS * 77);
        const void* weights = number == attar::Number::float32 ? static_cast<const void*>(floats.data()) : halves.data();
        const auto matrix = attar::pack_dense(arena, weights, OUTPUTS, 77, number);
        check_products(factors_of(matrix, bias.data(), false, 0), "dense");
    }
}

void check_rows() {
    for (const std::int64_t columns : {1, 16, 45, 300}) {
        const std::int64_t rows = 5;
        const std::vector<float> x = random_floats(rows * columns * 2), weight = random_floats(columns);
        for (const attar::Norm kind : {attar::Norm::rms, attar::Norm::layer})
            compare("norm", [&](attar::Level level) {
                std::vector<float> sum = poisoned(rows * columns), out = sum;
                attar::norm(kind, x.data(), x.data() + rows * columns, rows, columns, weight.data(), weight.data(),
                            1e-6f, 1.0f, sum.data(), out.data(), level);
                return bytes_of(out);
            });
        for (const attar::Activation kind : {attar::Activation::silu, attar::Activation::gelu,
                                             attar::Activation::gelu_tanh, attar::Activation::relu})
            compare("activate", [&](attar::Level level) {
                std::vector<float> out = poisoned(rows * columns);
                attar::activate(kind, true, x.data(), rows, columns, out.data(), level);
                return bytes_of(out);
            });
        compare("quantize_rows_int8", [&](attar::Level level) {
            std::vector<std::int8_t> codes(static_cast<std::size_t>(rows * columns));
            std::vector<float> scales(static_cast<std::size_t>(rows));
            attar::quantize_rows_int8(x.data(), rows, columns, codes.data(), scales.data(), level);
            return bytes_of(codes);
        });
    }
}

void check_attention() {
    constexpr std::int64_t BLOCKS = 48, BLOCK = 16, HEADS = 6, KV_HEADS = 2;
    for (const attar::KvLayout stored :
         {attar::KvLayout::float32, attar::KvLayout::bfloat16, attar::KvLayout::int8, attar::KvLayout::fp8})
        for (const std::int64_t size : {16, 40})
            for (const std::int64_t rows : {1, 20, 700}) {
                const std::int64_t slots = BLOCKS * BLOCK, padded = (size + 15) / 16 * 16;
                const std::vector<float> q = random_floats(rows * HEADS * size),
                                         k = random_floats(slots * KV_HEADS * size),
                                         v = random_floats(slots * KV_HEADS * size), angles = random_floats(4);
                const std::vector<std::int32_t> starts{0, static_cast<std::int32_t>(rows)},
                    lengths{static_cast<std::int32_t>(slots)};
                std::vector<std::int32_t> tables(BLOCKS), positions, angle(slots, 0);
                for (std::int32_t i = 0; i < BLOCKS; ++i) tables[i] = (i * 5) % BLOCKS;
                for (std::int64_t i = slots - rows; i < slots; ++i) positions.push_back(static_cast<std::int32_t>(i));
                std::vector<std::int64_t> where(slots);
                for (std::int64_t i = 0; i < slots; ++i) where[i] = i;
                compare("attention of " + std::to_string(rows) + " rows", [&](attar::Level level) {
                    const std::size_t bytes = static_cast<std::size_t>(BLOCKS * BLOCK * KV_HEADS * padded * 4);
                    Bytes keys(bytes), values(bytes);
                    std::vector<float> key_scales(slots * KV_HEADS), value_scales(slots * KV_HEADS),
                        turned = poisoned(slots * KV_HEADS * size), out = poisoned(rows * HEADS * size);
                    const bool scaled = stored == attar::KvLayout::int8 || stored == attar::KvLayout::fp8;
                    const attar::Pages pages{stored, keys.data(), values.data(), scaled ? key_scales.data() : nullptr,
                                             scaled ? value_scales.data() : nullptr, nullptr, nullptr, BLOCKS,
                                             BLOCK, KV_HEADS, size, nullptr, 0, nullptr, nullptr, 0, false, nullptr, 0};
                    attar::Write write{};
                    write.q = k.data(), write.k = k.data(), write.v = v.data();
                    write.q_stride = write.k_stride = write.v_stride = KV_HEADS * size;
                    write.rows = slots, write.heads = KV_HEADS, write.eps = 1e-6f;
                    write.cos = angles.data(), write.sin = angles.data() + 2, write.angles = 1, write.turned = 4;
                    write.angle = angle.data(), write.slots = where.data(), write.q_out = turned.data();
                    attar::write_kv(write, pages, level);
                    attar::Attention what{};
                    what.q = q.data(), what.rows = rows, what.heads = HEADS, what.sequences = 1;
                    what.row_starts = starts.data(), what.lengths = lengths.data(), what.tables = tables.data();
                    what.width = BLOCKS, what.positions = positions.data(), what.scale = 0.2f, what.out = out.data();
                    attar::attention(what, pages, level);
                    Bytes found = bytes_of(out);
                    for (const Bytes& more : {keys, values, bytes_of(turned)})
                        found.insert(found.end(), more.begin(), more.end());
                    return found;
                });
            }
}

// Blocks of 2 runs are written in two calls each, the second of which fills them; of the last one only the first call is
// made, so that it stays unfinished. Bits of planes are uneven, of every number from 0 to 6; KIVI's groups are of 16.
void check_narrow() {
    constexpr std::int64_t BLOCKS = 20, BLOCK = 32, HEADS = 6, KV_HEADS = 2, TAILS = 3;
    for (const char* kind : {"planes", "planes of byte scales, with recent blocks", "KIVI"})
        for (const std::int64_t size : {16, 64, 80})
            for (const std::int64_t rows : {1, 16}) {
                const bool recent = std::strcmp(kind, "planes") != 0, kivi = std::strcmp(kind, "KIVI") == 0;
                const std::int64_t slots = BLOCKS * BLOCK, last = slots - BLOCK / 2, buckets = size / 8;
                const std::vector<float> q = random_floats(rows * HEADS * size),
                                         k = random_floats(slots * KV_HEADS * size),
                                         v = random_floats(slots * KV_HEADS * size),
                                         back = random_floats(KV_HEADS * size * size),
                                         into = random_floats(KV_HEADS * size * size),
                                         mean = random_floats(KV_HEADS * size);
                std::vector<float> weights = random_floats(KV_HEADS * size), shares(KV_HEADS * size, 0.004f);
                for (float& each : weights) each *= each;
                std::vector<std::uint8_t> bits(KV_HEADS * buckets);
                std::int64_t units = 0;
                for (std::int64_t i = 0; i < buckets; ++i) {
                    bits[i] = static_cast<std::uint8_t>(i % 7 == 0 ? 4 : i % 7 == 4 ? 0 : i % 7);
                    bits[2 * buckets - 1 - i] = bits[i];
                    units += bits[i];
                }
                const attar::Coordinates side{back.data(), into.data(), mean.data(), weights.data(), shares.data(),
                                              bits.data()};
                const attar::Bases bases{side, side};
                const std::int64_t run = kivi ? 4 * size : 16 * units;  // bytes
                const std::vector<std::int32_t> starts{0, static_cast<std::int32_t>(rows)},
                    lengths{static_cast<std::int32_t>(last)}, call{0, BLOCK / 2};
                std::vector<std::int32_t> tables(BLOCKS), positions;
                for (std::int32_t i = 0; i < BLOCKS; ++i) tables[i] = (i * 7) % BLOCKS;
                for (std::int64_t i = last - rows; i < last; ++i) positions.push_back(static_cast<std::int32_t>(i));
                const std::vector<std::int64_t> tails{1};
                compare(kind, [&](attar::Level level) {
                    Bytes keys(BLOCKS * KV_HEADS * BLOCK / 16 * run), values = keys;
                    std::vector<std::uint16_t> key_scales(slots * KV_HEADS * (kivi ? size / 16 : 1)),
                                               value_scales = key_scales, key_zeros = key_scales, value_zeros = key_scales,
                                               recent_keys(TAILS * KV_HEADS * BLOCK * size), recent_values = recent_keys;
                    std::vector<float> turned = poisoned(slots * HEADS * size), out = poisoned(rows * HEADS * size);
                    const auto halves = [recent](std::vector<std::uint16_t>& of) {
                        return recent ? reinterpret_cast<attar::Bfloat16*>(of.data()) : nullptr;
                    };
                    const attar::Pages pages{kivi ? attar::KvLayout::kivi : attar::KvLayout::bit_planes, keys.data(),
                                             values.data(), key_scales.data(), value_scales.data(),
                                             kivi ? key_zeros.data() : nullptr, kivi ? value_zeros.data() : nullptr,
                                             BLOCKS, BLOCK, KV_HEADS, size, kivi ? nullptr : &bases, kivi ? 16 : units,
                                             halves(recent_keys), halves(recent_values), TAILS, recent && !kivi, nullptr, 0};
                    for (std::int64_t from = 0; from < last; from += BLOCK / 2) {
                        std::vector<std::int64_t> where(BLOCK / 2);
                        for (std::int64_t i = 0; i < BLOCK / 2; ++i)
                            where[i] = tables[from / BLOCK] * BLOCK + from % BLOCK + i;
                        attar::Write write{};
                        write.q = write.k = k.data() + from * KV_HEADS * size;
                        write.v = v.data() + from * KV_HEADS * size;
                        write.q_stride = write.k_stride = write.v_stride = KV_HEADS * size;
                        write.rows = BLOCK / 2, write.heads = KV_HEADS, write.eps = 1e-6f;
                        write.slots = where.data(), write.q_out = turned.data() + from * KV_HEADS * size;
                        if (recent) write.row_starts = call.data(), write.tails = tails.data(), write.sequences = 1;
                        attar::write_kv(write, pages, level);
                    }
                    attar::Attention what{};
                    what.q = q.data(), what.rows = rows, what.heads = HEADS, what.sequences = 1;
                    what.row_starts = starts.data(), what.lengths = lengths.data(), what.tables = tables.data();
                    what.width = BLOCKS, what.positions = positions.data(), what.scale = 0.02f, what.out = out.data();
                    if (recent) what.tails = tails.data();
                    attar::attention(what, pages, level);
                    Bytes found = bytes_of(out);
                    for (const Bytes& more : {keys, values, bytes_of(key_scales), bytes_of(value_scales),
                                              bytes_of(key_zeros), bytes_of(value_zeros), bytes_of(turned), bytes_of(recent_keys), bytes_of(recent_values)})
                        found.insert(found.end(), more.begin(), more.end());
                    return found;
                });
            }
}

// KVQuant's pages, of heads that end with half a vector too, and of some that have more than one outlier.
void check_channels() {
    constexpr std::int64_t BLOCKS = 20, BLOCK = 32, HEADS = 6, KV_HEADS = 2;
    for (const std::int64_t bits : {3, 4})
        for (const std::int64_t size : {8, 64, 200})
            for (const std::int64_t rows : {1, 20}) {
                const std::int64_t slots = BLOCKS * BLOCK, outliers = size < 200 ? 1 : 2;
                const std::vector<float> q = random_floats(rows * HEADS * size),
                                         k = random_floats(slots * KV_HEADS * size),
                                         v = random_floats(slots * KV_HEADS * size),
                                         mean = random_floats(KV_HEADS * size), queries = random_floats(slots * HEADS * size);
                std::vector<float> spread = random_floats(KV_HEADS * size), levels;
                for (float& each : spread) each = each * each + 0.1f;
                for (int i = 0; i < 1 << bits; ++i) levels.push_back(0.3f * static_cast<float>(i) - 1.9f);
                const std::vector<std::int32_t> starts{0, static_cast<std::int32_t>(rows)},
                    lengths{static_cast<std::int32_t>(slots)};
                std::vector<std::int32_t> tables(BLOCKS), positions;
                for (std::int32_t i = 0; i < BLOCKS; ++i) tables[i] = (i * 7) % BLOCKS;
                for (std::int64_t i = slots - rows; i < slots; ++i) positions.push_back(static_cast<std::int32_t>(i));
                std::vector<std::int64_t> where(slots);
                for (std::int64_t i = 0; i < slots; ++i) where[i] = tables[i / BLOCK] * BLOCK + i % BLOCK;
                compare("KVQuant in " + std::to_string(bits) + " bits", [&](attar::Level level) {
                    Bytes keys(slots * KV_HEADS * bits * size / 8), values = keys;
                    Bytes key_columns(slots * KV_HEADS * outliers), value_columns = key_columns;
                    std::vector<std::uint16_t> scales(slots * KV_HEADS), key_outliers(slots * KV_HEADS * outliers),
                        value_outliers = key_outliers, key_firsts(BLOCKS * KV_HEADS * size), value_firsts = key_firsts;
                    std::vector<float> turned = poisoned(slots * HEADS * size), out = poisoned(rows * HEADS * size);
                    const auto side = [&](std::vector<std::uint16_t>& apart, Bytes& columns, std::vector<std::uint16_t>& firsts) {
                        return attar::Channels{mean.data(), spread.data(), levels.data(),
                                               reinterpret_cast<attar::Bfloat16*>(apart.data()), columns.data(),
                                               reinterpret_cast<attar::Bfloat16*>(firsts.data())};
                    };
                    const attar::TwoChannels both{side(key_outliers, key_columns, key_firsts),
                                                  side(value_outliers, value_columns, value_firsts)};
                    const attar::Pages pages{attar::KvLayout::kvquant, keys.data(), values.data(), nullptr, scales.data(),
                                             nullptr, nullptr, BLOCKS, BLOCK, KV_HEADS, size, nullptr, bits, nullptr,
                                             nullptr, 0, false, &both, outliers};
                    attar::Write write{};
                    write.q = queries.data(), write.k = k.data(), write.v = v.data();
                    write.q_stride = HEADS * size, write.k_stride = write.v_stride = KV_HEADS * size;
                    write.rows = slots, write.heads = HEADS, write.eps = 1e-6f;
                    write.slots = where.data(), write.q_out = turned.data();
                    attar::write_kv(write, pages, level);
                    attar::Attention what{};
                    what.q = q.data(), what.rows = rows, what.heads = HEADS, what.sequences = 1;
                    what.row_starts = starts.data(), what.lengths = lengths.data(), what.tables = tables.data();
                    what.width = BLOCKS, what.positions = positions.data(), what.scale = 0.02f, what.out = out.data();
                    attar::attention(what, pages, level);
                    Bytes found = bytes_of(out);
                    for (const Bytes& more : {keys, values, key_columns, value_columns, bytes_of(scales), bytes_of(turned),
                                              bytes_of(key_outliers), bytes_of(value_outliers), bytes_of(key_firsts),
                                              bytes_of(value_firsts)})
                        found.insert(found.end(), more.begin(), more.end());
                    return found;
                });
            }
}

void check_limits() {
    for (const std::string& name : attar::levels())
        if (attar::multiply_int8(100, false, attar::level_of(name)) <= 0) ++failures;
    const auto arena = std::make_shared<attar::Arena>();
    std::uint8_t* memory = arena->allocate(8192);
    memory[5000] = 1;
    compare("read_all", [&](attar::Level level) { return Bytes{attar::read_all(memory, 8192, level) != 0}; });
}

}  // namespace

// Usage: check_levels [LEVEL], which the machine must have.
int main(int count, char** arguments) {
    if (count > 1) attar::level_of(arguments[1]);  // throws where it is not there
    check_linear();
    check_rows();
    check_attention();
    check_narrow();
    check_channels();
    check_limits();
    std::printf("levels");
    for (const std::string& name : attar::levels()) std::printf(" %s", name.c_str());
    std::printf(": %d comparisons, %d failed\n", checks, failures);
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
