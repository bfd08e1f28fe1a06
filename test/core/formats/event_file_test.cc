#include "core/formats/event_file.h"

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <limits>

#include "test/core/formats/event_reader.h"

using namespace tessera;
using testing::error_of;
using testing::event_files;
using testing::read_events;
using testing::ReadEvent;

namespace {

std::string name_of_file(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

}  // namespace

TEST_CASE("event_file: the checksums are those of RFC 3720, masked", "[formats]") {
  CHECK(crc32c("") == 0);
  CHECK(crc32c("123456789") == 0xe3069283u);
  CHECK(crc32c(std::string(32, '\0')) == 0x8a9136aau);
  CHECK(crc32c(std::string(32, '\xff')) == 0x62a8ab43u);
  // rotr(0xe3069283, 15) + 0xa282ead8.
  CHECK(masked_crc32c("123456789") == 0xc78ab0e5u);
}

TEST_CASE("event_file: what is added is read back, with its steps", "[formats]") {
  const testing::TempDir dir;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::string long_text(100'000, 'x');
  EventFile file(dir.path(), 1);
  const std::vector<EventScalar> scalars = {
      {"loss/train", 2.5}, {"speed/tokens", 3e9}, {"odd \xff", nan}, {"zero", 0}};
  file.add_scalars(1, scalars);
  file.add_scalars(int64_t{1} << 40, std::span(scalars).first(1));
  file.add_text(0, "config", "a = 1\nb = \"\xff\"\n" + long_text);
  const std::vector<std::pair<std::string, SettingValue>> settings = {
      {"optim.lr", 1e-3}, {"train.steps", int64_t{7}}, {"a.flag", true}, {"a.name", "é"}};
  file.add_settings(0, settings);
  // Each record is there when its call has returned.
  const std::vector<ReadEvent> events = read_events(file.path());
  REQUIRE(events.size() == 6);
  CHECK(events[0].file_version == "brain.Event:2");
  CHECK(events[0].wall_time > 1.7e9);
  CHECK(events[1].is_start);
  CHECK(events[1].step == 1);
  REQUIRE(events[2].scalars.size() == 4);
  CHECK(events[2].step == 1);
  CHECK(events[2].scalars[0] == std::pair<std::string, float>("loss/train", 2.5f));
  CHECK(events[2].scalars[1] == std::pair<std::string, float>("speed/tokens", 3e9f));
  CHECK(events[2].scalars[2].first == "odd \xef\xbf\xbd");
  CHECK(std::isnan(events[2].scalars[2].second));
  CHECK(events[3].step == int64_t{1} << 40);
  CHECK(events[4].texts.at("config") == "    a = 1\n    b = \"\xef\xbf\xbd\"\n    " + long_text);
  CHECK(std::get<double>(events[5].settings.at("optim.lr")) == 1e-3);
  CHECK(std::get<double>(events[5].settings.at("train.steps")) == 7);
  CHECK(std::get<bool>(events[5].settings.at("a.flag")));
  CHECK(std::get<std::string>(events[5].settings.at("a.name")) == "é");
}

TEST_CASE("event_file: a later file sorts behind, and takes back the steps it comes to again",
          "[formats]") {
  const testing::TempDir dir;
  const std::vector<EventScalar> one = {{"loss", 1}}, two = {{"loss", 2}};
  std::vector<std::string> paths;
  {
    EventFile first(dir.path(), 1);
    for (int64_t step = 1; step <= 4; ++step) first.add_scalars(step, one);
    paths.push_back(first.path());
  }
  // In the same second, and behind one of another program whose clock is ahead.
  EventFile second(dir.path(), 3);
  second.add_scalars(3, two);
  paths.push_back(second.path());
  CHECK(testing::shown_scalars(dir.path()).at("loss") ==
        std::map<int64_t, float>{{1, 1}, {2, 1}, {3, 2}});
  paths.push_back(dir.write("events.out.tfevents.9000000000.other.1.0", ""));
  EventFile third(dir.path(), 4);
  paths.push_back(third.path());
  CHECK(event_files(dir.path()) == paths);
  CHECK(name_of_file(third.path()).starts_with("events.out.tfevents.9000000001."));
  // Within one session.
  third.add_scalars(4, two);
  third.restart(2);
  third.add_scalars(2, two);
  CHECK(testing::shown_scalars(dir.path()).at("loss") == std::map<int64_t, float>{{1, 1}, {2, 2}});
}

TEST_CASE("event_file: what cannot be written is an error, and the file keeps whole records",
          "[formats]") {
  const testing::TempDir dir;
  const std::string error = error_of([&] { EventFile(dir / "none", 1); });
  CHECK(error.starts_with(dir / "none/events.out.tfevents."));
  CHECK(error.ends_with(".tessera: cannot be written: No such file or directory"));
  const auto old_action = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  // A file may be no longer than that: as on a full disk.
  const auto error_within = [&](uint64_t nbytes, const std::function<void()>& f) {
    const rlimit limit{nbytes, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
    const std::string found = error_of(f);
    setrlimit(RLIMIT_FSIZE, &before);
    return found;
  };
  CHECK(error_within(30, [&] { EventFile(dir.path(), 1); }).ends_with("File too large"));
  CHECK(event_files(dir.path()).empty());
  EventFile file(dir.path(), 1);
  const std::vector<EventScalar> scalars = {{"a tag that takes some bytes", 1}};
  file.add_scalars(1, scalars);
  const std::string whole = testing::read_file(file.path());
  CHECK(error_within(whole.size() + 20, [&] { file.add_scalars(2, scalars); }) ==
        file.path() + ": cannot be written: File too large");
  CHECK(testing::read_file(file.path()) == whole);
  file.add_scalars(2, scalars);
  CHECK(read_events(file.path()).size() == 4);
  std::signal(SIGXFSZ, old_action);
}

TEST_CASE("event_file: only those of ours are removed", "[formats]") {
  const testing::TempDir dir;
  { EventFile(dir.path(), 1); }
  { EventFile(dir.path(), 1); }
  const std::string other = dir.write("events.out.tfevents.1700000000.host.1.0", "");
  std::filesystem::create_directory(dir / "events.out.tfevents.1.tessera");
  std::filesystem::create_symlink(other, dir / "events.out.tfevents.2.tessera");
  remove_event_files(dir.path());
  CHECK(event_files(dir.path()) == std::vector<std::string>{dir / "events.out.tfevents.1.tessera",
                                                            other,
                                                            dir / "events.out.tfevents.2.tessera"});
}
