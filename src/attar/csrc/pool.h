// Threads that share the items of one call.
//
// What. A call is a number of items. Threads take them one by one, and which thread computes an item does not
// matter to its bits. The calling thread works too. At the end it waits for items that helpers have begun, never for a
// helper that has begun none. Items of `for_each_twice` may be computed twice: the caller does not wait for a helper that
// the system put aside within one, but computes that item itself.
//
// Why this way. An OpenMP region ends when every thread of its team has arrived. On cores shared with another program the
// system puts one of them aside for a whole time slice, some milliseconds, and a decode step has a hundred regions. So
// beside a busy loop two threads decoded at 0.8 of the speed of one (1.5 B parameters), or at half of it (0.135 B). Here a
// thread put aside costs what it would have computed, and at worst the rest of one item.
//
// How. A call is a job. The caller offers it to each helper in a slot that both exchange for null, and takes back at the
// end the offers that no helper took. A helper that took one counts as a holder: a job is used again, and frees what it
// keeps, when nobody holds it. Helpers free nothing, and no lock can be held by a thread put aside. Helpers live as long
// as the process; a forked process makes its own. Idle threads spin for a moment, then sleep. Helpers have a lower priority
// than the caller: while the caller is put aside nothing goes on, so helpers give way to it on a core that they share, and
// the system does not move it about to make room for them.
//
// Products of a few rows read memory, and a thread reads best what lies together. So each thread has a stretch of their
// items, takes it in order, and then takes from the others' stretches. While the caller does alone what comes between two
// products, helpers read the beginning of their next stretch into their caches. Which product is next was seen before: the
// same ones follow each other in every step.
//
// What was not done. Calls from several threads at once do not queue: the first has the pool, others compute alone.
// Threads are not bound to cores, where they could not leave one that another program uses. Products of many rows are not
// computed twice: their items would need memory of their own, and the last of them are a small part of a call. Packing of
// weights at load, and torch's operations, stay with OpenMP.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include "cpu.h"

namespace attar {

// Where the first helpers' stretches of the call after this one began when it was last made; null: not known. They are only
// asked for, so they need not be valid.
struct Following {
    std::array<const std::uint8_t*, 31> starts{};
};

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
    // Of calls whose items read memory: where an item's begins, and what follows the call.
    const std::uint8_t* (*start)(const void* context, std::int64_t item) = nullptr;
    std::shared_ptr<Following> following = nullptr;
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

// The same for `call`, whose members are those of Work: items may be computed twice, and read memory.
template <class Call>
void for_each_twice(std::int64_t items, bool parallel, const std::shared_ptr<const Call>& call,
                    const std::shared_ptr<Following>& following) {
    share(items, parallel && items > 1 ? threads() : 1,
          {call.get(), [](const void* at, std::int64_t item) { static_cast<const Call*>(at)->compute(item); },
           [](const void* at, std::int64_t item) { static_cast<const Call*>(at)->apart(item); },
           [](const void* at, std::int64_t item) { static_cast<const Call*>(at)->copy(item); }, call,
           [](const void* at, std::int64_t item) { return static_cast<const Call*>(at)->start(item); }, following});
}

}  // namespace attar
