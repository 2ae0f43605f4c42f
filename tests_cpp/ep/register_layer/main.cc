#include "support/mpi_main.h"

int main(int argc, char** argv) { return test::RunUnderMpi(argc, argv, "test_ep"); }
