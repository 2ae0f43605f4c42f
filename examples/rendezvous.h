/* Finding the other ranks without MPI, for C and C++: a rank's place, and how rank 0's ncclUniqueId comes to the
 * others. */
#ifndef NVTE_EP_EXAMPLES_RENDEZVOUS_H_
#define NVTE_EP_EXAMPLES_RENDEZVOUS_H_

#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A number from the environment: torchrun and `nvte-ep launch` set the first variable, Open MPI's mpirun the second. */
static inline int rank_number(const char* first, const char* second, int otherwise) {
  const char* text = getenv(first);
  if (text == NULL) text = getenv(second);
  return text == NULL ? otherwise : atoi(text);
}
static inline int find_rank(void) { return rank_number("RANK", "OMPI_COMM_WORLD_RANK", 0); }
static inline int find_size(void) { return rank_number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", 1); }
static inline int find_local_rank(void) { return rank_number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", 0); }

/* A file that all ranks of this run know. `nvte-ep launch` has a folder for it. Else NVTE_EP_EXAMPLE_RENDEZVOUS names
   it, which has to be on a shared file system for several machines; or it is called after the launcher, the ranks'
   parent, of whose number and start time there is only one. */
static inline void rendezvous_file(char* path, size_t room) {
  const char *launch = getenv("NVTE_EP_LAUNCH_DIRECTORY"), *named = getenv("NVTE_EP_EXAMPLE_RENDEZVOUS");
  const char* folder = getenv("TMPDIR");
  char text[1024] = "";
  const char* started;
  FILE* stat;
  int field;
  if (launch != NULL) {
    snprintf(path, room, "%s/id", launch);
    return;
  }
  if (named != NULL) {
    snprintf(path, room, "%s", named);
    return;
  }
  snprintf(text, sizeof text, "/proc/%ld/stat", (long)getppid());
  stat = fopen(text, "rb");
  text[0] = 0;
  if (stat != NULL) {
    text[fread(text, 1, sizeof text - 1, stat)] = 0;
    fclose(stat);
  }
  started = strrchr(text, ')'); /* the name before it may hold blanks */
  for (field = 2; field < 22 && started != NULL; field++) started = strchr(started + 1, ' ');
  snprintf(path, room, "%s/nvte_ep_example_%ld_%ld_%.*s", folder == NULL ? "/tmp" : folder, (long)getuid(),
           (long)getppid(), started == NULL ? 0 : (int)strcspn(started + 1, " "), started == NULL ? "" : started + 1);
}

/* Makes the id on rank 0, and brings it to the others; 0 where it does not come within a minute. */
static inline int share_id(ncclUniqueId* id, int rank) {
  char path[4096], unfinished[4200];
  FILE* file = NULL;
  int tries, is_whole;
  rendezvous_file(path, sizeof path);
  if (rank == 0) {
    snprintf(unfinished, sizeof unfinished, "%s.new", path);
    if (ncclGetUniqueId(id) != ncclSuccess || (file = fopen(unfinished, "wb")) == NULL) return 0;
    is_whole = fwrite(id, sizeof *id, 1, file) == 1;
    return fclose(file) == 0 && is_whole && rename(unfinished, path) == 0;
  }
  for (tries = 0; tries < 6000 && file == NULL; tries++) {
    const struct timespec pause = {0, 10 * 1000 * 1000};
    file = fopen(path, "rb");
    if (file == NULL) nanosleep(&pause, NULL);
  }
  if (file == NULL) return 0;
  is_whole = fread(id, sizeof *id, 1, file) == 1;
  fclose(file);
  return is_whole;
}

/* Rank 0's, once the communicator is made: every rank has read the file by then. */
static inline void forget_id(int rank) {
  char path[4096];
  rendezvous_file(path, sizeof path);
  if (rank == 0) remove(path);
}

#endif /* NVTE_EP_EXAMPLES_RENDEZVOUS_H_ */
