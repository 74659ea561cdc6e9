// The kernels' threads (csrc/pool.h) under stress: thousands of short calls from one to four threads, each with another
// number of helpers. Helpers are delayed within items, share one core with the callers, or run only when no other thread
// wants a core. Every item of every call must be there, right, and computed as often as its kind allows. What belongs to
// the caller is freed at once, so a write or a read that comes late is a finding of the sanitizers that this is built with
// (sanitize.sh). Forks happen while other threads are within calls, except under ThreadSanitizer, which forbids it, and
// AddressSanitizer, whose allocator does not survive it: a lock that another thread holds stays locked in the child.

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../src/attar/csrc/pool.h"

std::int64_t attar::threads() { return 4; }  // of the templates in pool.h; the calls here choose their own number

namespace {

constexpr int CALLS = 3000, CALLERS = 4, WIDTH = 8, MOST_ITEMS = 40, MOST_WORKERS = 6;
std::atomic<int> failures{0};
thread_local bool is_caller = false;
thread_local std::uint64_t state = 0;

std::uint32_t random_below(std::uint32_t limit) {
    if (state == 0) state = reinterpret_cast<std::uintptr_t>(&state);
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>(state >> 33) % limit;
}

void expect(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "check_pool: %s\n", what);
    ++failures;
}

// What a scheduler does to a thread: nothing mostly, sometimes another thread's turn. Helpers suffer longer ones.
void delay() {
    const std::uint32_t chance = random_below(256);
    if (chance < 16) sched_yield();
    if (!is_caller && chance == 16) usleep(300);
}

std::int32_t value(std::int32_t seed, std::int64_t item, int at) {
    return static_cast<std::int32_t>(seed * 31 + item * 7 + at);
}

bool right(const std::vector<std::int32_t>& out, std::int32_t seed) {
    for (std::size_t i = 0; i < out.size(); ++i)
        if (out[i] != value(seed, static_cast<std::int64_t>(i) / WIDTH, static_cast<int>(i) % WIDTH)) return false;
    return true;
}

void once(std::int64_t items, std::int64_t workers, std::int32_t seed) {
    std::vector<std::int32_t> out(static_cast<std::size_t>(items) * WIDTH, -1), times(static_cast<std::size_t>(items), 0);
    const auto compute = [&](std::int64_t item) {
        delay();
        for (int k = 0; k < WIDTH; ++k) out[item * WIDTH + k] = value(seed, item, k);
        ++times[item];
        if (item == 3 && seed % 16 == 0) attar::for_each(4, true, [&](std::int64_t) { delay(); });  // a call within a call
    };
    const auto step = [](const void* at, std::int64_t item) { (*static_cast<decltype(&compute)>(at))(item); };
    attar::share(items, workers, {&compute, step});
    expect(right(out, seed), "an item computed once is missing or wrong");
    for (const std::int32_t each : times) expect(each == 1, "an item was not computed exactly once");
}

// Items that may be computed twice: the seed is kept, the outputs are the caller's.
struct Twice {
    std::unique_ptr<std::int32_t> seed;
    std::int32_t* out;

    static std::int32_t* memory() {
        static thread_local std::int32_t results[WIDTH];
        return results;
    }
    void compute(std::int64_t item) const {
        for (int k = 0; k < WIDTH; ++k) out[item * WIDTH + k] = value(*seed, item, k);
    }
    void apart(std::int64_t item) const {
        delay();
        for (int k = 0; k < WIDTH; ++k) memory()[k] = value(*seed, item, k);
        delay();
        if (random_below(64) == 0) throw std::runtime_error("a helper that fails leaves its item to the caller");
    }
    void copy(std::int64_t item) const {
        for (int k = 0; k < WIDTH; ++k) out[item * WIDTH + k] = memory()[k];
    }
};

void twice(std::int64_t items, std::int64_t workers, std::int32_t seed) {
    std::vector<std::int32_t> out(static_cast<std::size_t>(items) * WIDTH, -1);
    {
        const auto call = std::make_shared<const Twice>(Twice{std::make_unique<std::int32_t>(seed), out.data()});
        attar::share(items, workers,
                     {call.get(), [](const void* at, std::int64_t item) { static_cast<const Twice*>(at)->compute(item); },
                      [](const void* at, std::int64_t item) { static_cast<const Twice*>(at)->apart(item); },
                      [](const void* at, std::int64_t item) { static_cast<const Twice*>(at)->copy(item); }, call});
    }
    expect(right(out, seed), "an item computed twice is missing or wrong");
}

void throwing(std::int64_t items, std::int64_t workers) {
    bool thrown = false;
    const auto compute = [&](std::int64_t item) {
        delay();
        if (item % 5 == 0) throw std::invalid_argument("item");
    };
    const auto step = [](const void* at, std::int64_t item) { (*static_cast<decltype(&compute)>(at))(item); };
    try {
        attar::share(items, workers, {&compute, step});
    } catch (const std::invalid_argument&) {
        thrown = true;
    }
    expect(thrown, "an exception was lost");
}

void call(int calls) {
    is_caller = true;
    for (int i = 0; i < calls; ++i) {
        const std::int64_t items = 1 + random_below(MOST_ITEMS), workers = 1 + random_below(MOST_WORKERS);
        once(items, workers, i);
        twice(items, workers, i);
        if (i % 16 == 0) throwing(items, workers);
    }
}

void callers(int count, int calls) {
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i) threads.emplace_back(call, calls);
    for (std::thread& each : threads) each.join();
}

template <class Each>
void each_helper(const Each& each) {
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        std::ifstream(task.path() / "comm") >> name;
        if (name == "attar-helper") each(std::stoi(task.path().filename()));
    }
}

[[maybe_unused]] void forks() {
    std::atomic<bool> stop{false};
    std::thread beside([&] {
        while (!stop) call(10);
    });
    for (int i = 0; i < 20; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            call(20);
            int helpers = 0;
            each_helper([&](int) { ++helpers; });
            _exit(failures || helpers == 0);
        }
        int status = -1;
        waitpid(child, &status, 0);
        expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked process computed wrongly, or alone");
    }
    stop = true;
    beside.join();
}

}  // namespace

int main() {
    for (int count = 1; count <= CALLERS; ++count) callers(count, CALLS / count);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    forks();
#endif
    each_helper([](int task) {
        const sched_param none{};
        expect(sched_setscheduler(task, SCHED_IDLE, &none) == 0, "a helper's priority cannot be lowered");
    });
    callers(2, CALLS / 4);
    cpu_set_t all, first;
    sched_getaffinity(0, sizeof(all), &all);
    CPU_ZERO(&first);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&first) == 0; ++cpu)
        if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &first);
    each_helper([&](int task) { sched_setaffinity(task, sizeof(first), &first); });
    sched_setaffinity(0, sizeof(first), &first);  // and so of the callers
    callers(1, CALLS / 4);
    std::printf("check_pool: %d failures\n", failures.load());
    return failures != 0;
}
