#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/env.h"

namespace acc::base {
namespace {

// Starts every test without any ACC_* variable and puts the environment back afterwards.
class Env : public testing::Test {
 protected:
  void SetUp() override {
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string text(*entry);
      if (text.starts_with("ACC_") || text.starts_with("LOCAL_WORLD_SIZE=")) saved_.push_back(text);
    }
    for (const std::string& text : saved_) unset(text.substr(0, text.find('=')));
    env::forget_for_testing();
  }

  void TearDown() override {
    for (const std::string& name : changed_) unset(name);
    for (const std::string& text : saved_) {
      const size_t equals = text.find('=');
      setenv(text.substr(0, equals).c_str(), text.substr(equals + 1).c_str(), 1);
    }
    env::forget_for_testing();
  }

  void set(const std::string& name, const std::string& value) {
    setenv(name.c_str(), value.c_str(), 1);
    changed_.insert(name);
    env::forget_for_testing();
  }
  static void unset(const std::string& name) { unsetenv(name.c_str()); }

  template <class Call>
  static std::string message(Call&& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

 private:
  std::vector<std::string> saved_;
  std::set<std::string> changed_;
};

TEST_F(Env, UnsetVariablesHaveTheirDefaults) {
  EXPECT_EQ(env::mode(), env::Mode::Full);
  EXPECT_EQ(env::executor(), env::Executor::Auto);
  EXPECT_EQ(env::host_devices(), 1);
  EXPECT_EQ(env::log_level(), env::LogLevel::Info);
  EXPECT_EQ(env::plan_cache_bytes(), uint64_t{256} << 20);
  EXPECT_EQ(env::max_pending(), 20'000);
  EXPECT_EQ(env::max_pending_bytes(), uint64_t{2048} << 20);
  EXPECT_EQ(env::max_inflight(), 1);
  EXPECT_TRUE(env::source_lines());
  EXPECT_EQ(env::dump(), env::Dump::None);
  EXPECT_EQ(env::cxx(), "");
  EXPECT_EQ(env::compile_timeout_s(), 60);
  EXPECT_EQ(env::cache_dir(), "");
  EXPECT_EQ(env::cache_bytes(), uint64_t{256} << 20);
}

TEST_F(Env, EveryWordOfAChoiceIsUnderstood) {
  for (const env::Mode mode :
       {env::Mode::Eager, env::Mode::NoFuse, env::Mode::NoGraph, env::Mode::Full}) {
    set("ACC_MODE", env::name(mode));
    EXPECT_EQ(env::mode(), mode) << env::name(mode);
  }
  for (const env::Executor executor :
       {env::Executor::Auto, env::Executor::Cuda, env::Executor::Host}) {
    set("ACC_EXECUTOR", env::name(executor));
    EXPECT_EQ(env::executor(), executor) << env::name(executor);
  }
  for (const env::Dump dump :
       {env::Dump::None, env::Dump::Graph, env::Dump::Plan, env::Dump::Passes}) {
    set("ACC_DUMP", env::name(dump));
    EXPECT_EQ(env::dump(), dump) << env::name(dump);
  }
  for (const env::LogLevel level :
       {env::LogLevel::Debug, env::LogLevel::Info, env::LogLevel::Warning, env::LogLevel::Error}) {
    set("ACC_LOG_LEVEL", env::name(level));
    EXPECT_EQ(env::log_level(), level) << env::name(level);
  }
}

TEST_F(Env, WordsAreTheDocumentedOnes) {
  EXPECT_STREQ(env::name(env::Mode::Eager), "eager");
  EXPECT_STREQ(env::name(env::Mode::NoFuse), "nofuse");
  EXPECT_STREQ(env::name(env::Mode::NoGraph), "nograph");
  EXPECT_STREQ(env::name(env::Mode::Full), "full");
  EXPECT_STREQ(env::name(env::Executor::Cuda), "cuda");
  EXPECT_STREQ(env::name(env::Dump::None), "");
  EXPECT_STREQ(env::name(env::LogLevel::Warning), "warning");
}

TEST_F(Env, TheCaseOfLettersDoesNotMatter) {
  set("ACC_LOG_LEVEL", "DEBUG");
  EXPECT_EQ(env::log_level(), env::LogLevel::Debug);
}

TEST_F(Env, AnEmptyVariableIsAnUnsetOne) {
  set("ACC_MODE", "");
  set("ACC_HOST_DEVICES", "");
  set("LOCAL_WORLD_SIZE", "");
  EXPECT_EQ(env::mode(), env::Mode::Full);
  EXPECT_EQ(env::host_devices(), 1);
}

TEST_F(Env, NumbersAndFlagsAreRead) {
  set("ACC_PLAN_CACHE_MB", "3");
  set("ACC_MAX_PENDING", "77");
  set("ACC_MAX_PENDING_MB", "5");
  set("ACC_MAX_INFLIGHT", "0");
  set("ACC_SOURCE_LINES", "0");
  EXPECT_EQ(env::plan_cache_bytes(), uint64_t{3} << 20);
  EXPECT_EQ(env::max_pending(), 77);
  EXPECT_EQ(env::max_pending_bytes(), uint64_t{5} << 20);
  EXPECT_EQ(env::max_inflight(), 0);
  EXPECT_FALSE(env::source_lines());
}

TEST_F(Env, AStringIsTakenAsItIsWritten) {
  set("ACC_CACHE_DIR", " Some Where/x=y ");
  set("ACC_CXX", "Clang++");
  EXPECT_EQ(env::cache_dir(), " Some Where/x=y ");
  EXPECT_EQ(env::cxx(), "Clang++");
}

TEST_F(Env, AVariableIsReadOnce) {
  set("ACC_MODE", "eager");
  set("ACC_CXX", "g++");
  EXPECT_EQ(env::mode(), env::Mode::Eager);
  EXPECT_EQ(env::cxx(), "g++");
  setenv("ACC_MODE", "nofuse", 1);
  setenv("ACC_CXX", "clang++", 1);
  EXPECT_EQ(env::mode(), env::Mode::Eager);
  EXPECT_EQ(env::cxx(), "g++");
}

TEST_F(Env, VariablesOfOthersAreReadEachTime) {
  set("ACC_TEST_FOREIGN", "1");
  EXPECT_EQ(env::foreign("ACC_TEST_FOREIGN"), "1");
  setenv("ACC_TEST_FOREIGN", "2", 1);
  EXPECT_EQ(env::foreign("ACC_TEST_FOREIGN"), "2");
  const std::vector<std::string> all = env::all();
  EXPECT_EQ(std::count(all.begin(), all.end(), "ACC_TEST_FOREIGN=2"), 1);
  unset("ACC_TEST_FOREIGN");
  EXPECT_EQ(env::foreign("ACC_TEST_FOREIGN"), "");
}

TEST_F(Env, ABadWordNamesTheVariableTheValueAndWhatIsAllowed) {
  set("ACC_MODE", "fast");
  EXPECT_EQ(message([] { env::mode(); }),
            "[env] ACC_MODE=fast is not allowed. Set it to one of: eager, nofuse, nograph, full, "
            "or unset it (full).");
  set("ACC_DUMP", "all");
  EXPECT_EQ(
      message([] { env::dump(); }),
      "[env] ACC_DUMP=all is not allowed. Set it to one of: graph, plan, passes, or unset it.");
}

TEST_F(Env, ABadNumberNamesTheVariableTheValueAndTheRange) {
  for (const std::string bad : {"0", "65", "-1", "2x", " 2", "2.0", "99999999999999999999"}) {
    set("ACC_HOST_DEVICES", bad);
    EXPECT_EQ(message([] { env::host_devices(); }),
              "[env] ACC_HOST_DEVICES=" + bad +
                  " is not allowed. Set it to a whole number in 1..64, or unset it (1).");
  }
  set("ACC_SOURCE_LINES", "yes");
  EXPECT_EQ(message([] { env::source_lines(); }),
            "[env] ACC_SOURCE_LINES=yes is not allowed. Set it to one of: 0, 1, or unset it (1).");
}

TEST_F(Env, ABadVariableThrowsAgainAndDoesNotHarmOthers) {
  set("ACC_EXECUTOR", "gpu");
  EXPECT_THROW(env::executor(), Error);
  EXPECT_THROW(env::executor(), Error);
  EXPECT_THROW(env::validate(), Error);
  EXPECT_EQ(env::mode(), env::Mode::Full);
  set("ACC_EXECUTOR", "host");
  EXPECT_NO_THROW(env::validate());
}

TEST_F(Env, EachLocalRankHasAHostDevice) {
  set("LOCAL_WORLD_SIZE", "4");
  EXPECT_EQ(env::host_devices(), 4);
  set("ACC_HOST_DEVICES", "2");
  EXPECT_EQ(env::host_devices(), 4);
  set("ACC_HOST_DEVICES", "6");
  EXPECT_EQ(env::host_devices(), 6);
}

TEST_F(Env, AnImpossibleLocalWorldSizeIsAnErrorThatNamesIt) {
  for (const std::string bad : {"65", "0", "many"}) {
    set("LOCAL_WORLD_SIZE", bad);
    const std::string text = message([] { env::host_devices(); });
    EXPECT_NE(text.find("LOCAL_WORLD_SIZE=" + bad), std::string::npos) << text;
    EXPECT_THROW(env::validate(), Error);
  }
}

TEST_F(Env, TheTableDescribesEveryVariableInOneLine) {
  std::set<std::string> names;
  for (const env::Variable& variable : env::table()) {
    EXPECT_TRUE(names.insert(variable.name).second) << variable.name << " is there twice";
    EXPECT_TRUE(variable.name.starts_with("ACC_")) << variable.name;
    EXPECT_FALSE(variable.allowed.empty()) << variable.name;
    EXPECT_GT(variable.doc.size(), 10u) << variable.name;
    EXPECT_EQ(variable.doc.find('\n'), std::string::npos) << variable.name;
    EXPECT_TRUE(variable.type == "choice" || variable.type == "integer" ||
                variable.type == "flag" || variable.type == "string")
        << variable.type;
  }
  EXPECT_EQ(names, (std::set<std::string>{"ACC_MODE",
                                          "ACC_EXECUTOR",
                                          "ACC_HOST_DEVICES",
                                          "ACC_HOST_GRAPHS",
                                          "ACC_LOG_LEVEL",
                                          "ACC_PLAN_CACHE_MB",
                                          "ACC_MAX_PENDING",
                                          "ACC_MAX_PENDING_MB",
                                          "ACC_MAX_INFLIGHT",
                                          "ACC_SOURCE_LINES",
                                          "ACC_DUMP",
                                          "ACC_SKIP_PASSES",
                                          "ACC_EXACT",
                                          "ACC_DETERMINISTIC",
                                          "ACC_STRICT",
                                          "ACC_CXX",
                                          "ACC_COMPILE_TIMEOUT_S",
                                          "ACC_CACHE_DIR",
                                          "ACC_CACHE_MB",
                                          "ACC_KERNEL_TEXTS"}));
}

// The getters index the table by position: a wrong order would check a value against the allowed
// ones of another variable.
TEST_F(Env, TheDefaultsOfTheTableAreAccepted) {
  for (const env::Variable& variable : env::table()) {
    set(variable.name, variable.default_value);
    EXPECT_NO_THROW(env::validate()) << variable.name;
    if (variable.type == "string") continue;
    set(variable.name, "certainly wrong");
    EXPECT_NE(message([] { env::validate(); }).find(variable.name + "=certainly wrong"),
              std::string::npos);
    set(variable.name, "");
  }
}

TEST_F(Env, UnknownNamesAreListedSorted) {
  set("ACC_MOED", "full");
  set("ACC_EXECUTORS", "host");
  set("XACC_MODE", "full");
  EXPECT_EQ(env::unknown(), (std::vector<std::string>{"ACC_EXECUTORS", "ACC_MOED"}));
}

TEST_F(Env, NamesOfTheBuildOfTheTestsAndOfOpenAccAreNotUnknown) {
  for (const char* name : {"ACC_CUDA", "ACC_SAN", "ACC_SEEDS_DIR", "ACC_TEST_SLOW", "ACC_MODE",
                           "ACC_DEVICE_TYPE", "ACC_DEVICE_NUM", "ACC_PROFLIB"}) {
    set(name, "1");
  }
  EXPECT_EQ(env::unknown(), std::vector<std::string>());
}

TEST(Check, StreamsItsArgumentsOnlyWhenItFails) {
  int evaluated = 0;
  const auto value = [&evaluated] { return ++evaluated; };
  ACC_CHECK(true, "never ", value());
  EXPECT_EQ(evaluated, 0);
  try {
    ACC_CHECK(evaluated == 1, "[where] got ", value(), " and ", 2.5, ". Do this.");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[where] got 1 and 2.5. Do this.");
  }
}

TEST(Check, WithoutArgumentsNamesTheExpressionAndTheFile) {
  try {
    ACC_CHECK(1 + 1 == 3);
    FAIL() << "no error";
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("1 + 1 == 3"), std::string::npos) << text;
    EXPECT_NE(text.find("test_env.cpp:"), std::string::npos) << text;
  }
}

TEST(Check, IsOneStatement) {
  const auto branch = [](bool take) {
    if (take)
      ACC_CHECK(take, "never");
    else
      ACC_FAIL("[branch] not taken");
    return true;
  };
  EXPECT_TRUE(branch(true));
  EXPECT_THROW(branch(false), Error);
}

}  // namespace
}  // namespace acc::base
