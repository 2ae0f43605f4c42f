//! The examples at the end of each `--help`; a test of [`crate::args`] parses them.

/// Of the command.
pub const ALL: &str = "\
Examples:
  nvte-ep doctor                                   what this machine has, and what is missing
  nvte-ep run                                      a layer step on four ranks, with every output checked
  nvte-ep launch -n 2 -- ./program                 your program on two ranks, without a GPU
  nvte-ep bench --runtime cuda --tokens 4096       how long calls take here";
/// Of launch.
pub const LAUNCH: &str = "\
Examples:
  nvte-ep launch -n 2 -- ./program --its-option    two ranks on the host runtime
  nvte-ep launch -n 4 --timeout 60 -- python train.py
  nvte-ep launch -n 8 --runtime cuda -- ./program  on this machine's GPUs
  nvte-ep launch -n 8 --runtime cuda --nnodes 2 --node-rank 0 --rdzv node0:29400 -- ./program";
/// Of doctor.
pub const DOCTOR: &str = "\
Examples:
  nvte-ep doctor                                   for GPUs
  nvte-ep doctor --run                             and a step on what was found
  nvte-ep doctor --runtime host                    for the host runtime
  nvte-ep doctor --json | jq '.checks[] | select(.level == \"problem\")'";
/// Of plot.
pub const PLOT: &str = "\
Examples:
  nvte-ep bench --tokens 128,1024,4096 --json > bench.json; nvte-ep plot bench.json
  nvte-ep plot a.json b.json -o pictures --format svg,png";
/// Of plan.
pub const PLAN: &str = "\
Examples:
  nvte-ep plan -n 8,16,32,64 --tokens 4096 --hidden 7168 --top-k 8 --experts 256
  nvte-ep plan -n 72 --ranks-per-domain 72 --experts 288 --top-k 8
  nvte-ep plan -n 8,64 --experts 256 --capacity-factor 2 --link-gb-per-s 450 --rail-gb-per-s 50
  nvte-ep plan --zero-copy --json | jq '.plans[0].group_bytes'";
/// Of run.
pub const RUN: &str = "\
Examples:
  nvte-ep run                                      four ranks, on GPUs where there are fit ones
  nvte-ep run --runtime host -n 8 --experts 64 --top-k 8 --dtype f32
  nvte-ep run --digest --seed 5                    hashes, to compare runs bit by bit
  mpirun -n 4 nvte-ep run --tokens 4096            ranks of MPI";
/// Of bench.
pub const BENCH: &str = "\
Examples:
  nvte-ep bench --tokens 4096 --hidden 7168 --top-k 8 --experts 64
  nvte-ep bench -n 2,4 --tokens 128,4096 --routing uniform,zipf --json > bench.json
  nvte-ep bench --graph --dtype bf16,mxfp8 --csv
  nvte-ep bench --transfer staged --against /opt/te/libtransformer_engine.so";
/// Of warmup.
pub const WARMUP: &str = "\
Examples:
  nvte-ep warmup -n 8 --tokens 4096 --hidden 7168 --top-k 8 --experts 256
  nvte-ep warmup -n 8 --tokens 4096 --hidden 4096,7168 --dtype bf16,mxfp8 --transfer both
  nvte-ep warmup -n 8 --shapes shapes.toml         a file of the job's layers
  mpirun -n 16 nvte-ep warmup --tokens 4096        on the machines of the job";
