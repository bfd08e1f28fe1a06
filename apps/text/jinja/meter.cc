#include "apps/text/jinja/meter.h"

#include <limits>

namespace tessera::text::jinja {
namespace {

thread_local Meter* current_meter = nullptr;

}  // namespace

Meter::Meter(const Limits& limits) : limits_(limits), previous_(current_meter) {
  current_meter = this;
}

Meter::~Meter() {
  current_meter = previous_;
}

Meter* Meter::current() {
  return current_meter;
}

void Meter::step(int64_t count) {
  num_steps_ += count;
  if (num_steps_ > limits_.max_steps) {
    fail("takes more than {} operations, which is the limit", limits_.max_steps);
  }
}

void Meter::expect(int64_t nbytes) const {
  if (nbytes > limits_.max_nbytes - live_nbytes_) {
    fail("needs more than {} bytes of memory, which is the limit", limits_.max_nbytes);
  }
}

Unmetered::Unmetered() : meter_(current_meter) {
  current_meter = nullptr;
}

Unmetered::~Unmetered() {
  current_meter = meter_;
}

Level::Level(Meter& meter) : meter_(meter) {
  if (meter.depth >= meter.limits().max_depth) {
    fail("nests deeper than {} levels, which is the limit", meter.limits().max_depth);
  }
  ++meter.depth;
}

Charge::Charge(int64_t nbytes) : meter_(current_meter), nbytes_(0) {
  grow(nbytes);
}

Charge::~Charge() {
  if (meter_ != nullptr) meter_->add(-nbytes_);
}

void Charge::grow(int64_t nbytes) {
  if (meter_ == nullptr) return;
  meter_->expect(nbytes);
  meter_->add(nbytes);
  nbytes_ += nbytes;
}

void count_steps(int64_t count) {
  if (current_meter != nullptr) current_meter->step(count);
}

void expect_nbytes(int64_t nbytes) {
  if (current_meter == nullptr) return;
  current_meter->expect(nbytes);
  current_meter->step(nbytes / 32);
}

void expect_growing(size_t nbytes) {
  if (current_meter == nullptr) return;
  current_meter->expect(product(static_cast<int64_t>(nbytes), 3));
}

int64_t product(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? std::numeric_limits<int64_t>::max() : result;
}

}  // namespace tessera::text::jinja
