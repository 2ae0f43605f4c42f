// gtest under MPI: rank 0 prints, other ranks print their failures, and a failure of any rank fails all.

#ifndef NVTE_EP_TESTS_SUPPORT_MPI_MAIN_H_
#define NVTE_EP_TESTS_SUPPORT_MPI_MAIN_H_

namespace test {

// Runs all tests of the program on all ranks; returns main's exit status, the same on every rank. `program` names the
// JUnit file, <program>_<ranks>.xml in $XML_LOG_DIR.
int RunUnderMpi(int argc, char** argv, const char* program);

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_MPI_MAIN_H_
