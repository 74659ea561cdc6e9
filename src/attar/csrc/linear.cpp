// Rows times packed weights.
//
// Order. Whatever the number of rows, threads or chunks, an output is made by the same float operations:
//
//     for each part (the columns that share both scales), in index order:
//         value = float(sum of activation codes times (weight code - zero))          exact: integers of 32 bits
//         value = value * activation scale of the group                              only where rows are scaled by group
//         total = fma(value, weight scale, total)
//         shift = fma(float(sum of activation codes), weight offset, shift)          only where weights have offsets;
//     total = total + shift                                                          scaled by group as the value is
//     out = total * activation scale of the row                                      only where rows are scaled whole
//     out = out + bias
//
// Where the scales of groups are a float times a small integer of each (matrix.h calls it fine), and parts of 128 columns
// share the float and the activation's scale, the integers join the sum, and the part is all 128 columns:
//
//         value = float(sum over groups of fine scale * sum of int8 activation codes times (weight code - zero))
//
// Offsets keep the parts of their groups.
//
// Integers may be summed in any order, so every level and every path gives the same bits. In float32 products the value
// is a chain of fma over the columns in index order, starting from zero; dense weights are one group without a scale.
// Weights with offsets are scaled and moved before they meet x there, and the group's value is added as it is.
//
// Three ways to work. A few rows: weights are unpacked in registers, and the speed is that of reading them. Many integer:
// a group of 64 output columns is unpacked once to a buffer in the first-level cache and multiplied with all rows of a
// chunk, by AMX tiles where there are, else 4 rows by 64 columns in registers. Float32: the same panels, as floats.

#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cstdlib>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "pool.h"
#include "simd.h"

namespace attar {
namespace {

// Buffers of one thread, kept from call to call; they grow to what the largest call of the process needs.
class Scratch {
   public:
    std::uint8_t* at(int index, std::int64_t bytes) {
        Buffer& buffer = buffers_[index];
        if (bytes > buffer.size) {
            buffer.memory.reset(static_cast<std::uint8_t*>(::operator new(static_cast<std::size_t>(bytes), ALIGNMENT)));
            buffer.size = bytes;
        }
        return buffer.memory.get();
    }

   private:
    static constexpr std::align_val_t ALIGNMENT{64};
    struct Free {
        void operator()(std::uint8_t* memory) const { ::operator delete(memory, ALIGNMENT); }
    };
    struct Buffer {
        std::unique_ptr<std::uint8_t, Free> memory;
        std::int64_t size = 0;
    };
    Buffer buffers_[6];
};

#define ATTAR_KERNELS "linear.inl"
#include "for_levels.h"

thread_local Scratch of_thread;  // of the thread that works on a panel
thread_local std::shared_ptr<Scratch> of_call;  // of the thread that calls: what all threads of the call share
thread_local Scratch of_gate;    // of the thread that calls: outputs before they are gated

constexpr std::int64_t CHUNK_BYTES = std::int64_t{1} << 20;  // of int8 rows that share an unpacked panel
constexpr std::int64_t LARGEST_CHUNK = 512;                  // rows
constexpr std::int64_t FLOAT_CHUNK = 192;                    // rows, a multiple of those in registers
constexpr std::int64_t PANEL = 4;                            // blocks
constexpr std::int64_t PIECES = 8, MOST_PIECES = 32;         // a thread, of the blocks of a few rows' product
constexpr std::int64_t PIECE_BYTES = 64 << 10;               // that more than the least pieces have: 5 us to wait for at the end
constexpr std::int64_t SERIAL_BELOW = 1 << 15;               // multiplications; a shared call costs a microsecond
constexpr std::int64_t MOST = std::numeric_limits<std::int64_t>::max() / 1024;

// Rows from which weights are unpacked, or made floats, once for all of them, by Level; measured by bench/kernels.py.
constexpr std::int64_t OF_CODES[] = {5, 5, 4, 5, 5, 3};
constexpr std::int64_t OF_BYTES[] = {5, 5, 4, 5, 5, 1};  // 8 bits, whole rows to a scale: tiles read them where they lie
constexpr std::int64_t OF_FINE[] = {5, 5, 4, 5, 5, 5};  // codes of groups with fine scales: longer to unpack
constexpr std::int64_t OF_NUMBERS[] = {5, 5, 5, 5, 33, 33};
std::int64_t forced[] = {MEASURED, MEASURED, MEASURED, MEASURED, MEASURED, MEASURED};

std::int64_t many_from(const Factors& factors, Level level) {
    const int at = static_cast<int>(level);
    const Matrix& m = *factors.factors.front().matrix;
    if (forced[at] != MEASURED) return forced[at];
    if (m.number != Number::codes || !factors.integer) return OF_NUMBERS[at];
    if (m.fine_scales) return OF_FINE[at];
    return m.bits == 8 && m.groups == 1 && factors.activation_group == 0 ? OF_BYTES[at] : OF_CODES[at];
}

// Memory for what a call shares: the last call's, unless a thread still reads it.
Scratch& shared_by_call() {
    if (!of_call || of_call.use_count() > 1) of_call = std::make_shared<Scratch>();
    std::atomic_thread_fence(std::memory_order_acquire);
    return *of_call;
}

// Block `index` of all factors, counted through: (factor, block within it).
struct Place {
    const Factor* factor;
    std::int64_t block;
};
Place find(const std::vector<Factor>& factors, std::int64_t index, std::int64_t unit) {
    for (const Factor& factor : factors) {
        const std::int64_t count = (factor.matrix->blocks() + unit - 1) / unit;
        if (index < count) return {&factor, index * unit};
        index -= count;
    }
    return {nullptr, 0};
}
// In how many pieces threads take all blocks, where there are few rows.
std::int64_t pieces_of(const std::vector<Factor>& factors, std::int64_t blocks) {
    std::int64_t bytes = 0;
    for (const Factor& factor : factors) bytes += factor.matrix->blocks() * factor.matrix->block_bytes;
    return std::min(blocks, threads() * std::clamp(bytes / PIECE_BYTES / threads(), PIECES, MOST_PIECES));
}
std::int64_t count(const std::vector<Factor>& factors, std::int64_t unit) {
    std::int64_t total = 0;
    for (const Factor& factor : factors) total += (factor.matrix->blocks() + unit - 1) / unit;
    return total;
}

// Blocks from .. to of all factors, those of one factor at a time.
template <class Each>
void each_stretch(const std::vector<Factor>& factors, std::int64_t from, std::int64_t to, const Each& each) {
    while (from < to) {
        const Place place = find(factors, from, 1);
        const std::int64_t last = std::min(place.factor->matrix->blocks(), place.block + to - from);
        each(*place.factor, place.block, last);
        from += last - place.block;
    }
}

// A product of a few rows, in pieces of blocks that lie together: streams of memory. A piece may be computed twice
// (pool.h). What it reads apart belongs to it, but for biases: they are added last, and so can be added while copying.
class FewRows {
   public:
    FewRows(decltype(&portable::integer_few) multiply, const Factors& factors, const QuantizedRows& rows, std::int64_t pieces,
            float* out)
        : multiply_(multiply), factors_(factors.factors), own_(factors.factors), rows_(rows), of_rows_(of_call),
          blocks_(count(own_, 1)), pieces_(pieces), width_(factors.width), out_(out) {
        for (Factor& factor : own_) factor.bias = nullptr;
    }

    void compute(std::int64_t piece) const {
        each_stretch(factors_, from(piece), from(piece + 1), [&](const Factor& factor, std::int64_t first, std::int64_t last) {
            multiply_(factor, rows_, first, last, out_, width_, of_thread);
        });
    }
    // To the thread's memory: rows of the piece's outputs, padded to whole blocks.
    void apart(std::int64_t piece) const {
        float* part = memory(piece);
        each_stretch(own_, from(piece), from(piece + 1), [&](const Factor& factor, std::int64_t first, std::int64_t last) {
            multiply_(factor, rows_, first, last, part - factor.offset - first * LANES, stride(piece), of_thread);
            part += (last - first) * LANES;
        });
    }
    void copy(std::int64_t piece) const {
        const float* part = memory(piece);
        each_stretch(factors_, from(piece), from(piece + 1), [&](const Factor& factor, std::int64_t first, std::int64_t last) {
            const std::int64_t start = first * LANES, many = std::min(last * LANES, factor.matrix->rows) - start;
            for (std::int64_t r = 0; r < rows_.rows; ++r) {
                const float* row = part + r * stride(piece);
                float* to = out_ + r * width_ + factor.offset + start;
                for (std::int64_t i = 0; i < many; ++i) to[i] = factor.bias ? row[i] + factor.bias[start + i] : row[i];
            }
            part += (last - first) * LANES;
        });
    }
    const std::uint8_t* start(std::int64_t piece) const {
        const Place place = find(own_, from(piece), 1);
        return place.factor->matrix->block(place.block);
    }

   private:
    std::int64_t from(std::int64_t piece) const { return blocks_ * piece / pieces_; }
    std::int64_t stride(std::int64_t piece) const { return (from(piece + 1) - from(piece)) * LANES; }
    float* memory(std::int64_t piece) const {
        return reinterpret_cast<float*>(of_thread.at(3, rows_.rows * stride(piece) * 4));
    }

    decltype(&portable::integer_few) multiply_;
    const std::vector<Factor>& factors_;  // the caller's, and so is `out`
    std::vector<Factor> own_;             // without biases
    QuantizedRows rows_;
    std::shared_ptr<Scratch> of_rows_;
    std::int64_t blocks_, pieces_, width_;
    float* out_;
};

void prepare(const Factors& factors, const float* x, float* out) {
    for (std::int64_t i = 0; i < factors.columns; ++i) {
        const float value = factors.order ? x[factors.order[i]] : x[i];
        out[i] = factors.divisor ? value / factors.divisor[i] : value;
    }
}

// Columns at `column` whose high codes are zero.
Wide no_wide(const QuantizedRows& rows, std::int64_t column) {
    return {static_cast<std::uint32_t>(16 * column), static_cast<std::int32_t>(column / rows.part), 0, 0};
}

QuantizedRows quantize(const Factors& factors, const float* x, std::int64_t rows, bool few, Level level) {
    const Matrix& first = *factors.factors.front().matrix;
    const std::int64_t columns = factors.columns, tile = few ? std::min<std::int64_t>(rows, 16) : 16;
    QuantizedRows out{};
    out.rows = rows, out.columns = columns, out.steps = (columns + 63) / 64, out.tile = tile;
    out.group = factors.activation_group;
    out.scales_a_row = out.group ? (columns + out.group - 1) / out.group : 1;
    out.part = out.group ? std::min(out.group, first.group) : first.group, out.parts = (out.group ? columns : first.padded) / out.part;
    out.tiles = (rows + tile - 1) / tile;
    Scratch& memory = shared_by_call();
    out.codes = reinterpret_cast<std::int8_t*>(memory.at(0, out.steps * out.step_bytes()));
    out.scales = reinterpret_cast<float*>(memory.at(1, rows * out.scales_a_row * 4));
    out.sums = reinterpret_cast<std::int32_t*>(memory.at(2, rows * out.parts * 4));
    const bool offsets = std::any_of(factors.factors.begin(), factors.factors.end(),
                                     [](const Factor& factor) { return factor.matrix->offsets != nullptr; });
    if (factors.wide) {  // tiles read those of 16 rows, whether they are there or not
        const std::int64_t bytes = out.tiles * tile * out.scales_a_row * static_cast<std::int64_t>(sizeof(Wide));
        out.wide = reinterpret_cast<Wide*>(memory.at(4, bytes));
        for (std::int64_t r = rows; r < out.tiles * tile; ++r)
            for (std::int64_t g = 0; g < out.scales_a_row; ++g) *out.wide_at(r, g) = no_wide(out, g * out.group);
    }
    const bool parts_wanted = few || offsets || out.group;
    if (parts_wanted) {  // and a vector more: whole ones are read where fewer rows are there
        const std::int64_t all_parts = out.tiles * tile * out.parts;
        out.part_scales = reinterpret_cast<float*>(memory.at(3, all_parts * 8 + 64));
        out.terms = out.part_scales + all_parts;
    }
    const auto into = ATTAR_PICK(level, quantize_into);
    const auto parts = ATTAR_PICK(level, make_parts);
    const auto pairs = ATTAR_PICK(level, make_pairs);
    const bool paired = level == Level::avx2 && !few;
    if (paired) out.pairs = reinterpret_cast<std::int32_t*>(memory.at(5, rows * out.steps * 128));
    const bool prepared = factors.order || factors.divisor;
    for_rows(rows, rows > 1 && rows * columns >= SERIAL_BELOW, [&](std::int64_t r) {
        const float* from = x + r * columns;
        if (prepared) {
            auto* room = reinterpret_cast<float*>(of_thread.at(0, columns * 4));
            prepare(factors, from, room);
            from = room;
        }
        into(out, r, from, factors.fixed_scale);
        if (parts_wanted) parts(out, r);
        if (paired) pairs(out, r);
    });
    return out;
}

}  // namespace

std::int64_t many_rows(Level level) { return forced[static_cast<int>(level)]; }
void set_many_rows(Level level, std::int64_t rows) { forced[static_cast<int>(level)] = rows; }

void Factors::check() const {
    if (factors.empty()) throw std::invalid_argument("no weights to multiply by");
    const Matrix& first = *factors.front().matrix;
    for (const Factor& factor : factors) {
        const Matrix& m = *factor.matrix;
        if (m.columns != columns) throw std::invalid_argument("weights of one call have the same input columns");
        if (factor.offset < 0 || factor.offset > width - m.rows) throw std::invalid_argument("an output out of its row");
        if (!integer) continue;
        if (!m.integer) throw std::invalid_argument("integer products take weights that are codes of small integers");
        if (m.group != first.group || m.padded != first.padded)
            throw std::invalid_argument("integer products of one call have weights of the same groups");
    }
    if (gate) {
        const Matrix &a = first, &b = *factors.back().matrix;
        if (factors.size() != 2 || a.rows != b.rows || width != a.rows || factors.back().offset != 0 ||
            !a.same_form(b) || a.fine != b.fine)
            throw std::invalid_argument("gated products take two weights of one shape and form");
    }
    if (rounding.group < 0 || (rounding.kind != Rounding::none && integer))
        throw std::invalid_argument("rows are rounded once");
    if (wide && (!integer || activation_group == 0 || fixed_scale != 0.0f))
        throw std::invalid_argument("wide columns are of groups that have a scale of their own");
    const std::int64_t g = activation_group;
    if (g < 0 || (g && (!integer || g % RUN || columns % g || (g % first.group && first.group % g))))
        throw std::invalid_argument("a group of activations is a multiple of 32 columns that divides or is divided by the weights'");
    for (std::int64_t i = 0; order && i < columns; ++i)
        if (order[i] < 0 || order[i] >= columns) throw std::invalid_argument("the order of columns names one that is not there");
}

void linear(const Factors& factors, const float* x, std::int64_t rows, float* out, Level level) {
    if (rows < 0 || rows > MOST / std::max(factors.columns, factors.width))
        throw std::invalid_argument("impossible number of rows");
    if (rows == 0) return;
    const bool few_rows = rows < many_from(factors, level);
    if (factors.gate && (!factors.integer || few_rows)) {  // little to win by doing it in one
        Factors plain = factors;
        plain.gate = nullptr, plain.width = 2 * factors.width, plain.factors.back().offset = factors.width;
        auto* wide = reinterpret_cast<float*>(of_gate.at(0, rows * plain.width * 4));
        linear(plain, x, rows, wide, level);
        return activate(*factors.gate, true, wide, rows, factors.width, out, level);
    }
    const std::int64_t width = factors.width;
    const bool parallel = rows * factors.columns * width >= SERIAL_BELOW * 8;
    const std::int64_t blocks = count(factors.factors, 1), pieces = parallel ? pieces_of(factors.factors, blocks) : 1;
    if (factors.integer && few_rows) {
        const QuantizedRows quantized = quantize(factors, x, rows, true, level);
        const auto few = ATTAR_PICK(level, integer_few);
        const auto call = std::make_shared<const FewRows>(few, factors, quantized, pieces, out);
        return for_each_twice(pieces, parallel, call, factors.following);
    }
    if (factors.integer) {
        const std::int64_t unit = factors.gate ? PANEL / 2 : PANEL;
        const std::int64_t panels = count(factors.factors, unit) / (factors.gate ? 2 : 1);
        const QuantizedRows quantized = quantize(factors, x, rows, false, level);
        const auto many = ATTAR_PICK(level, integer_many);
        const std::int64_t fit = CHUNK_BYTES / (quantized.steps * 64) / 32 * 32;
        const std::int64_t chunk = std::min(std::clamp<std::int64_t>(fit, 32, LARGEST_CHUNK), rows);
        const std::int64_t chunks = (rows + chunk - 1) / chunk;
        for_each(chunks * panels, parallel, [&](std::int64_t item) {
            const Place place = find(factors.factors, item % panels, unit);
            const std::int64_t row = item / panels * chunk;
            many(factors, *place.factor, quantized, row, std::min(chunk, rows - row), place.block, out, of_thread);
        });
        return;
    }
    if (factors.order || factors.divisor || factors.rounding.kind != Rounding::none) {
        auto* room = reinterpret_cast<float*>(shared_by_call().at(0, rows * factors.columns * 4));
        const auto round = ATTAR_PICK(level, round_row);
        for_rows(rows, rows > 1 && rows * factors.columns >= SERIAL_BELOW, [&](std::int64_t r) {
            prepare(factors, x + r * factors.columns, room + r * factors.columns);
            if (factors.rounding.kind != Rounding::none) round(factors.rounding, room + r * factors.columns, factors.columns);
        });
        x = room;
    }
    const bool as_read = std::all_of(factors.factors.begin(), factors.factors.end(), [](const Factor& factor) {
        return factor.matrix->number != Number::codes || (factor.matrix->looked_up && factor.matrix->columns % 8 == 0);
    });
    if (as_read && few_rows) {
        const auto few = ATTAR_PICK(level, float_few);
        return for_each(pieces, parallel, [&](std::int64_t piece) {
            each_stretch(factors.factors, blocks * piece / pieces, blocks * (piece + 1) / pieces,
                         [&](const Factor& factor, std::int64_t first, std::int64_t last) {
                             few(factor, x, rows, first, last, out, width);
                         });
        });
    }
    const std::int64_t panels = count(factors.factors, PANEL);
    const auto panel = ATTAR_PICK(level, float_panel);
    const std::int64_t chunk = std::min(FLOAT_CHUNK, rows), chunks = (rows + chunk - 1) / chunk;
    for_each(chunks * panels, parallel, [&](std::int64_t item) {
        const Place place = find(factors.factors, item % panels, PANEL);
        const std::int64_t row = item / panels * chunk;
        panel(*place.factor, x, factors.columns, row, std::min(chunk, rows - row), place.block, out, width, of_thread);
    });
}

}  // namespace attar
