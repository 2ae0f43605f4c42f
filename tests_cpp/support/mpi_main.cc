#include "support/mpi_main.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "support/world.h"

namespace test {

namespace {

// Carries failures between ranks. Every rank runs the same tests in the same order, so the end of a test is a meeting
// point of all of them.
class RankListener : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& info) override {
    name_ = std::string(info.test_suite_name()) + "." + info.name();
  }

  void OnTestPartResult(const testing::TestPartResult& part) override {
    if (!part.failed()) return;
    if (World::Get().rank() != 0) {
      std::fprintf(stderr, "[rank %d] %s: %s:%d: %s\n", World::Get().rank(), name_.c_str(),
                   part.file_name() == nullptr ? "?" : part.file_name(), part.line_number(), part.message());
      std::fflush(stderr);
    }
    if (!settling_) World::Get().AnnounceFailure();
  }

  void OnTestEnd(const testing::TestInfo& info) override {
    const bool failed_here = info.result()->Failed();
    std::string who;
    settling_ = true;
    if (World::Get().SettleFailures(failed_here, &who) && !failed_here) ADD_FAILURE() << "failed on rank " << who;
    settling_ = false;
  }

  std::string name_;
  bool settling_ = false;
};

}  // namespace

int RunUnderMpi(int argc, char** argv, const char* program) {
  World::Start(&argc, &argv);
  World& world = World::Get();
  const char* xml_folder = std::getenv("XML_LOG_DIR");
  if (xml_folder != nullptr && *xml_folder != '\0') {
    GTEST_FLAG_SET(output,
                   "xml:" + std::string(xml_folder) + "/" + program + "_" + std::to_string(world.size()) + ".xml");
  }
  testing::InitGoogleTest(&argc, argv);

  // A shuffled order has to be the same everywhere.
  int seed = GTEST_FLAG_GET(random_seed);
  MPI_Bcast(&seed, 1, MPI_INT, 0, MPI_COMM_WORLD);
  GTEST_FLAG_SET(random_seed, seed == 0 ? 1 : seed);

  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  if (world.rank() != 0) {
    delete listeners.Release(listeners.default_result_printer());
    delete listeners.Release(listeners.default_xml_generator());
  }
  listeners.Append(new RankListener);
  const int status = RUN_ALL_TESTS();
  int worst = status;
  MPI_Allreduce(&status, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return World::Stop() ? worst : 1;
}

}  // namespace test
