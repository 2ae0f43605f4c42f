// gtest's main for the programs of one process, with JUnit output in $XML_LOG_DIR.

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string>

int main(int argc, char** argv) {
  const char* folder = std::getenv("XML_LOG_DIR");
  if (folder != nullptr && *folder != '\0') {
    const char* slash = std::strrchr(argv[0], '/');
    const char* runtime = std::getenv("NVTE_EP_RUNTIME");
    const std::string program = slash == nullptr ? argv[0] : slash + 1;
    GTEST_FLAG_SET(output, "xml:" + std::string(folder) + "/" + program + "_" +
                               (runtime == nullptr || *runtime == '\0' ? "cuda" : runtime) + ".xml");
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
