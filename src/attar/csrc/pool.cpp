// A job belongs to the pool. What it refers to belongs to the caller, and is read within an item that the caller waits
// for; of items computed twice, `apart` reads what the job keeps.
//
// An item that may be computed twice is written by the thread that claims it: a helper once its results are ready to be
// copied, the caller before it computes. So the caller waits for copies alone, which are short.
//
// All atomics are sequentially consistent: two pairs need it (offer and sleep, end and sleep), and the rest is not hot.

#include "pool.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attar {
namespace {

// Before a thread sleeps: longer than from one call of a step to the next, far shorter than a time slice. A caller that
// sleeps leaves its core to the thread that it waits for.
constexpr int TURNS = 4000;  // of 10 to 50 ns
constexpr std::int64_t MOST_HELPERS = 255;
constexpr int LOWER = 10;  // of helpers' priority
constexpr std::int64_t LOOK_AHEAD = 256 << 10;  // bytes of a helper's next stretch: an eighth of a second-level cache

using Clock = std::chrono::steady_clock;
using Flag = std::atomic<bool>;
using Word = std::atomic<std::int32_t>;

void turn() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// While the word has this value, until it is woken; or for no reason.
void sleep_on(Word& word, std::int32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    if (word == value) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake(Word& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
#else
    static_cast<void>(word);
#endif
}

class alignas(64) Job {
   public:
    Word holders{0};  // threads that may look at this job; nobody's at 0

    void begin(const Work& work, std::int64_t items, std::int32_t threads) {
        work_ = work, items_ = items, error_ = nullptr;
        failed_ = false, waiting_ = false, unfinished_ = static_cast<std::int32_t>(items);
        stretches_ = work.start ? threads : 1;
        if (stretch_room_ < stretches_) stretch_.reset(new Stretch[static_cast<std::size_t>(stretches_)]), stretch_room_ = stretches_;
        for (std::int64_t i = 0; i < stretches_; ++i) stretch_[i].next = first_of(i), stretch_[i].end = first_of(i + 1);
        if (work.apart && room_ < items) claimed_.reset(new Flag[static_cast<std::size_t>(items)]), room_ = items;
        for (std::int64_t i = 0; work.apart && i < items; ++i) claimed_[i].store(false, std::memory_order_relaxed);
        holders = threads;
    }

    bool reads() const { return work_.start != nullptr; }
    // Where the first item of a helper's stretch begins in memory.
    const std::uint8_t* start(std::int64_t helper) const { return work_.start(work_.context, first_of(helper + 1)); }

    // By a helper: items, while there are any.
    void help(std::int64_t helper) {
        each_item(helper + 1, [this](std::int64_t item) {
            if (!work_.apart) {
                compute(item);
                return true;
            }
            try {
                work_.apart(work_.context, item);
            } catch (...) {
                return true;  // so the caller will do it
            }
            if (claimed_[item].exchange(true)) return false;
            work_.copy(work_.context, item);
            finish();
            return true;
        });
    }

    // By the caller: items, while there are any. Returns how long one took, in the mean.
    Clock::duration lead() {
        const Clock::time_point since = Clock::now();
        std::int64_t done = 0;
        each_item(0, [&](std::int64_t item) {
            if (work_.apart) claimed_[item] = true;
            compute(item);
            ++done;
            return true;
        });
        return (Clock::now() - since) / std::max<std::int64_t>(done, 1);
    }

    // By the caller, when there are none left: until all have ended. Who takes longer than `patience` was put aside.
    std::exception_ptr end(Clock::duration patience) {
        const Clock::time_point until = Clock::now() + patience;
        while (work_.apart && unfinished_ && Clock::now() < until) turn();
        for (std::int64_t item = 0; work_.apart && unfinished_ && item < items_; ++item)
            if (!claimed_[item].exchange(true)) compute(item);
        for (int i = 0; i < TURNS && unfinished_; ++i) turn();
        waiting_ = unfinished_ != 0;
        for (std::int32_t left; (left = unfinished_) != 0;) sleep_on(unfinished_, left);
        return std::exchange(error_, nullptr);
    }

    void forget() { work_.kept.reset(); }

   private:
    // Items that one thread takes before any others.
    struct alignas(64) Stretch {
        std::atomic<std::int64_t> next{0};
        std::int64_t end = 0;
    };
    std::int64_t first_of(std::int64_t stretch) const { return items_ * stretch / stretches_; }

    // While `each` returns true: items of the thread's own stretch, then of the others'.
    template <class Each>
    void each_item(std::int64_t own, const Each& each) {
        for (std::int64_t i = 0; i < stretches_; ++i) {
            Stretch& stretch = stretch_[(own + i) % stretches_];
            for (std::int64_t item; (item = stretch.next.fetch_add(1)) < stretch.end;)
                if (!each(item)) return;
        }
    }

    void compute(std::int64_t item) {
        try {
            if (!failed_) work_.compute(work_.context, item);
        } catch (...) {
            if (!failed_.exchange(true)) error_ = std::current_exception();
        }
        finish();
    }

    void finish() {
        if (unfinished_.fetch_sub(1) == 1 && waiting_) wake(unfinished_);
    }

    Work work_{};
    std::int64_t items_ = 0, room_ = 0, stretches_ = 0, stretch_room_ = 0;
    std::unique_ptr<Stretch[]> stretch_;
    std::unique_ptr<Flag[]> claimed_;  // of items that may be computed twice
    std::exception_ptr error_;
    Flag failed_{false}, waiting_{false};  // the caller sleeps
    alignas(64) Word unfinished_{0};
};

struct alignas(64) Helper {
    const std::int64_t index;
    std::atomic<Job*> offered{nullptr};
    std::atomic<const std::uint8_t*> soon{nullptr};  // where its stretch of the next call begins, if there was one before
    Word asleep{0};

    explicit Helper(std::size_t at) : index(static_cast<std::int64_t>(at)) {}

    [[noreturn]] void run() {
#if defined(__linux__)  // where a priority is a thread's own
        [[maybe_unused]] const int priority = nice(LOWER);
#endif
        const std::uint8_t* ahead = nullptr;
        std::int64_t left = 0;  // bytes to ask for from there on
        for (;;) {
            Job* job = nullptr;
            for (int i = 0; i < TURNS && !job; ++i) {
                if (offered.load(std::memory_order_relaxed)) job = offered.exchange(nullptr);
                if (job) break;
                if (soon.load(std::memory_order_relaxed)) ahead = soon.exchange(nullptr), left = LOOK_AHEAD;
                if (left == 0) turn();
                for (const std::int64_t end = left - std::min<std::int64_t>(left, 256); left > end; left -= 64, ahead += 64)
                    __builtin_prefetch(ahead, 0, 2);
            }
            if (job) {
                if (job->reads()) left = 0;
                job->help(index);
                --job->holders;
                continue;
            }
            asleep = 1;
            if (!offered) sleep_on(asleep, 1);
            asleep = 0;
        }
    }

    void offer(Job& job) {
        offered = &job;
        if (asleep && asleep.exchange(0)) wake(asleep);
    }
};

class Pool {
   public:
    bool take() { return !taken_.exchange(true); }

    void share(std::int64_t items, std::int64_t workers, const Work& work) {
        const Taken taken{taken_};
        const std::size_t helpers = grow(static_cast<std::size_t>(std::min({workers - 1, items - 1, MOST_HELPERS})));
        Job& job = unused();
        job.begin(work, items, static_cast<std::int32_t>(helpers) + 1);
        for (std::size_t i = 0; i < helpers; ++i) helpers_[i]->offer(job);
        if (work.following) look_ahead(job, work.following, helpers);
        const Clock::duration item = job.lead();
        for (std::size_t i = 0; i < helpers; ++i)
            if (helpers_[i]->offered.exchange(nullptr)) --job.holders;
        const std::exception_ptr error = job.end(2 * item);
        if (--job.holders == 0) job.forget();
        if (error) std::rethrow_exception(error);
    }

   private:
    struct Taken {
        Flag& flag;
        ~Taken() { flag = false; }
    };

    // Notes where helpers begin in this call, for the one before it, and tells them where they begin in the next.
    void look_ahead(const Job& job, const std::shared_ptr<Following>& following, std::size_t helpers) {
        const std::size_t count = std::min(helpers, following->starts.size());
        for (std::size_t i = 0; last_ && i < count; ++i) last_->starts[i] = job.start(static_cast<std::int64_t>(i));
        last_ = following;
        for (std::size_t i = 0; i < count; ++i) helpers_[i]->soon = following->starts[i];
    }

    // So many helpers, if the system has threads for them. They live as long as the process.
    std::size_t grow(std::size_t wanted) {
        while (helpers_.size() < wanted) {
            helpers_.push_back(std::make_unique<Helper>(helpers_.size()));
            if (start(helpers_.back().get())) continue;
            helpers_.pop_back();
            break;
        }
        return std::min(wanted, helpers_.size());
    }

    static bool start(Helper* helper) {
#if defined(__linux__)  // signals are for the program's own threads, but for those of a thread's own fault
        sigset_t others, before;
        sigfillset(&others);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&others, fault);
        pthread_sigmask(SIG_SETMASK, &others, &before);
#endif
        bool started = true;
        try {
            std::thread thread([helper] { helper->run(); });
#if defined(__linux__)
            pthread_setname_np(thread.native_handle(), "attar-helper");
#endif
            thread.detach();
        } catch (const std::system_error&) {
            started = false;
        }
#if defined(__linux__)
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
        return started;
    }

    Job& unused() {
        Job* found = nullptr;
        for (const auto& job : jobs_)
            if (job->holders == 0) job->forget(), found = job.get();
        if (!found) found = jobs_.emplace_back(std::make_unique<Job>()).get();
        return *found;
    }

    Flag taken_{false};
    std::vector<std::unique_ptr<Helper>> helpers_;
    std::vector<std::unique_ptr<Job>> jobs_;
    std::shared_ptr<Following> last_;  // of the call of that kind before
};

// Never destroyed, for helpers may still look at it while the process ends. A forked process has none of the threads, so
// it gets a pool of its own.
Pool* pool = new Pool;

#if defined(__linux__)
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
#endif

}  // namespace

void share(std::int64_t items, std::int64_t workers, const Work& work) {
    if (workers > 1 && items > 1 && pool->take()) return pool->share(items, workers, work);
    for (std::int64_t item = 0; item < items; ++item) work.compute(work.context, item);
}

}  // namespace attar
