#include "test/testing.h"

#include <exception>
#include <thread>

#include "dist/comm/local.h"

using tessera::Error;
using tessera::testing::check_close;
using tessera::testing::error_of;

namespace {

/// What `f` throws on a thread of its own.
std::string error_on_thread(const std::function<void()>& f) {
  std::string message;
  std::thread([&] {
    try {
      f();
    } catch (const Error& error) {
      message = error.what();
    }
  }).join();
  return message;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

TEST_CASE("testing: an assertion that fails on a rank's thread fails the test's thread",
          "[testing]") {
  const std::string message = error_of([] {
    tessera::dist::run_ranks(3, [](tessera::dist::World& world) {
      INFO("rank " << world.rank());
      CAPTURE(world.rank());
      CHECK(world.rank() != 1);
      world.control().barrier();
    });
  });
  INFO(message);
  CHECK(message.find("testing_test.cc:") != std::string::npos);
  CHECK(ends_with(message, ": CHECK( world.rank() != 1 ) failed"));
}

TEST_CASE("testing: every assertion works on another thread", "[testing]") {
  const auto fails = [](const std::string& end, const std::function<void()>& f) {
    const std::string message = error_on_thread(f);
    INFO(message << " should end with " << end);
    CHECK(ends_with(message, end));
  };
  const auto throws = [] { throw Error("planted"); };
  fails("REQUIRE( 1 == 2 ) failed", [] { REQUIRE(1 == 2); });
  fails("CHECK_FALSE( true ) failed", [] { CHECK_FALSE(true); });
  fails("REQUIRE_FALSE( true ) failed", [] { REQUIRE_FALSE(true); });
  fails("planted", [&] { CHECK_NOTHROW(throws()); });
  fails("planted", [&] { REQUIRE_NOTHROW(throws()); });
  fails("CHECK_THROWS_AS( 1 + 1, Error ) failed", [] { CHECK_THROWS_AS(1 + 1, Error); });
  fails("REQUIRE_THROWS_AS( 1 + 1, Error ) failed", [] { REQUIRE_THROWS_AS(1 + 1, Error); });
  fails("FAIL( \"no\" ) failed", [] { FAIL("no"); });
  fails("values: index 1: actual 2, expected 4, error 2 > 1", [] {
    check_close(std::vector<double>{1, 2}, {1, 4}, 0.25);
  });
  CHECK(error_on_thread([&] {
          CHECK(1 == 1);
          REQUIRE_FALSE(false);
          CHECK_THROWS_AS(throws(), Error);
          CHECK_NOTHROW(std::string());
          check_close(std::vector<double>{1, 2}, {1, 2}, 0);
        }).empty());
}

TEST_CASE("testing: many threads assert at once", "[testing]") {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 10000; ++i) {
        INFO("round " << i);
        CHECK(i >= 0);
      }
    });
  }
  for (int i = 0; i < 10000; ++i) {
    INFO("round " << i);
    CHECK(i >= 0);
  }
  for (std::thread& thread : threads) thread.join();
}
