// Threads that share the items of one call.
//
// Items are taken one by one, in order, and who computes an item does not matter to its bits. The thread that calls works
// too, and waits at the end for items that others have begun, never for a thread that has begun none: the system may have
// put it aside, for as long as another program's turn lasts. Short items may be computed twice, and then nobody waits for
// those that a thread put aside has begun, either.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "cpu.h"

namespace attar {

// What one call does, by item.
struct Work {
    using Step = void (*)(const void* context, std::int64_t item);
    const void* context;
    Step compute;
    // Of items that may be computed twice. `apart` leaves its results in memory of the thread that computes, and `copy`
    // puts them where `compute` would have. Helpers do these, and a helper put aside within `apart` goes on with it after
    // the call has returned: all that it reads belongs to `kept`.
    Step apart = nullptr, copy = nullptr;
    std::shared_ptr<const void> kept = nullptr;
};

// Does items 0 .. items - 1 on at most `workers` threads, of which the caller is one. What `compute` throws is thrown here
// once all items that were begun have ended. Where the pool is in use, by another thread or by this one further up, the
// caller does everything itself.
void share(std::int64_t items, std::int64_t workers, const Work& work);

// `compute(item)`, where `parallel`, on so many threads as OpenMP would have.
template <class Compute>
void for_each(std::int64_t items, bool parallel, const Compute& compute) {
    const auto step = [](const void* context, std::int64_t item) { (*static_cast<const Compute*>(context))(item); };
    share(items, parallel && items > 1 ? threads() : 1, {&compute, step});
}

// The same for rows, a stretch of them at a time: they are many and short.
template <class Compute>
void for_rows(std::int64_t rows, bool parallel, const Compute& compute) {
    const std::int64_t stretches = std::min(rows, parallel ? 8 * threads() : 1);
    for_each(stretches, parallel, [&](std::int64_t item) {
        for (std::int64_t row = rows * item / stretches; row < rows * (item + 1) / stretches; ++row) compute(row);
    });
}

// The same for `call`, whose members are those of Work: items may be computed twice.
template <class Call>
void for_each_twice(std::int64_t items, bool parallel, const std::shared_ptr<const Call>& call) {
    share(items, parallel && items > 1 ? threads() : 1,
          {call.get(), [](const void* at, std::int64_t item) { static_cast<const Call*>(at)->compute(item); },
           [](const void* at, std::int64_t item) { static_cast<const Call*>(at)->apart(item); },
           [](const void* at, std::int64_t item) { static_cast<const Call*>(at)->copy(item); }, call});
}

}  // namespace attar
