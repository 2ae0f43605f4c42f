// The same program as C++ without exceptions.
#include "status.c"
