// What bindings share.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace attar {

// While one lives the interpreter is released. Counts the time, which is what a step's Python cost is measured against.
class Running {
   public:
    ~Running() { total_ += std::chrono::nanoseconds(std::chrono::steady_clock::now() - since_).count(); }
    static std::int64_t total_ns() { return total_; }

   private:
    static inline std::atomic<std::int64_t> total_{0};
    const nanobind::gil_scoped_release unlocked_;
    const std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

// In attention_module.cpp.
void bind_attention(nanobind::module_& module);

}  // namespace attar
