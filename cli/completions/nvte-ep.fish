# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_nvte_ep_global_optspecs
    string join \n h/help V/version
end

function __fish_nvte_ep_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_nvte_ep_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_nvte_ep_using_subcommand
    set -l cmd (__fish_nvte_ep_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c nvte-ep -n "__fish_nvte_ep_needs_command" -s h -l help -d 'Print help'
complete -c nvte-ep -n "__fish_nvte_ep_needs_command" -s V -l version -d 'Print version'
complete -c nvte-ep -n "__fish_nvte_ep_needs_command" -f -a "run" -d 'Run a mixture-of-experts layer, forward and backward, and check every output against a reference'
complete -c nvte-ep -n "__fish_nvte_ep_needs_command" -f -a "bench" -d 'Time every call on the device and on the host: staged against zero-copy groups, one library against another, over sweeps of shapes, with the device memory that a group takes'
complete -c nvte-ep -n "__fish_nvte_ep_needs_command" -f -a "warmup" -d 'Compile NCCL EP\'s kernels for the shapes of a job into its cache, before the job needs them'
complete -c nvte-ep -n "__fish_nvte_ep_needs_command" -f -a "launch" -d 'Start a program once a rank, without MPI: by default on the host runtime, which needs no GPU'
complete -c nvte-ep -n "__fish_nvte_ep_needs_command" -f -a "doctor" -d 'Look at what this machine has for expert parallelism, and say what is missing and what to do about it'
complete -c nvte-ep -n "__fish_nvte_ep_needs_command" -f -a "plan" -d 'Compute what a group takes and sends on each rank, without a GPU: receive rows, device memory, bytes over NVLink and rails'
complete -c nvte-ep -n "__fish_nvte_ep_needs_command" -f -a "plot" -d 'Draw what bench and run have printed with --json: time of each call, ratios to another library, bandwidth over tokens, how many rows each expert gets, and received rows with padding of each rank'
complete -c nvte-ep -n "__fish_nvte_ep_needs_command" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -s n -l ranks -l np -l nproc-per-node -d 'Ranks to start [default: 4; under a launcher, as many as it started]' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l tokens -d 'Most tokens a rank sends in one step' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l hidden -d 'Elements of a token' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l top-k -d 'Experts of a token' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l experts -d 'Experts over all ranks' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l max-sms -d 'Streaming multiprocessors that a rank\'s communication may use [default: the library\'s choice, shared out where ranks share a GPU]' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l align -d 'Every expert\'s received rows are padded to a multiple of this many; 0 or 1 = no padding' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l seed -d 'Seed of routing, tokens, gradients and experts' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l runtime -d 'Where to run' -r -f -a "auto\t'NVTE_EP_RUNTIME if set; else cuda where there is a fit GPU; else host'
cuda\t'GPUs, through CUDA, NCCL and NCCL EP'
host\t'The host runtime: no GPU needed'"
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l timeout -d 'Seconds after which the whole run is ended as failed' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l dtype -d 'Data type of tokens' -r -f -a "bf16\t'bfloat16'
f16\t'IEEE 754 binary16'
f32\t'IEEE 754 binary32'"
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l steps -d 'Steps, each with a routing of its own' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l expert-dim -d 'Inner dimension of the experts, y = B (A x)' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l plot -d 'Also draw the pictures that plot draws, as SVG, into this folder' -r -F
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l json -d 'Print machine-readable results instead of tables'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -s v -l verbose -d 'Pass on what the ranks print themselves (started ranks only)'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -l digest -d 'Also print a hash of every output, by step and rank, to compare runs bit by bit'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand run" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -s n -l ranks -l np -l nproc-per-node -d 'Ranks to start; several numbers, one run each [default: 4; under a launcher, as many as it started]' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l tokens -d 'Most tokens of a rank' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l hidden -d 'Elements of a token' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l top-k -d 'Experts of a token' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l experts -d 'Experts over all ranks' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l max-sms -d 'Streaming multiprocessors that a rank\'s communication may use [default: the library\'s choice, shared out where ranks share a GPU]' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l dtype -d 'Type of the rows that are dispatched. Combined are bf16 for mxfp8, else the same' -r -f -a "bf16\t'bfloat16'
f16\t'IEEE 754 binary16'
f32\t'IEEE 754 binary32'
mxfp8\t'8-bit floats (E4M3) with a scale for each 32'"
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l routing -d 'Who sends to whom' -r -f -a "uniform\t'Every expert is as likely as any other'
zipf\t'An expert is as likely as one over its place in a shuffled order'
hot\t'One expert is in every token\'s choice, the others are as likely as each other'
file\t'As recorded in the file of --routing-file'"
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l routing-file -d 'Recorded indices for --routing file: a line a token, the experts\' numbers between commas or blanks' -r -F
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l iterations -d 'Timed iterations of a round, after three that are not' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l rounds -d 'Rounds, in which the groups take turns, each made anew [default: 1; with --against 3]' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l transfer -d 'Which groups' -r -f -a "both\t'One after the other'
staged\t'Staged ones only'
zero-copy\t'Zero-copy ones only'"
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l against -d 'Another library with nvte_ep_* functions, of either ABI, to be timed by turns with this one' -r -F
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l link-gb-per-s -d 'What a GPU\'s links carry in one direction, in gigabytes a second: what is sent to other ranks is told as a share of it' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l plot -d 'Also draw the pictures that plot draws, as SVG, into this folder' -r -F
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l align -d 'Every expert\'s received rows are padded to a multiple of this many; 0 or 1 = no padding' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l seed -d 'Seed of routing, tokens, gradients and experts' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l runtime -d 'Where to run' -r -f -a "auto\t'NVTE_EP_RUNTIME if set; else cuda where there is a fit GPU; else host'
cuda\t'GPUs, through CUDA, NCCL and NCCL EP'
host\t'The host runtime: no GPU needed'"
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l timeout -d 'Seconds after which the whole run is ended as failed' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l graph -d 'Time replays of CUDA graphs, one for each call, instead of the calls'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l csv -d 'Print a line of comma-separated values for each case, group and call'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -l json -d 'Print machine-readable results instead of tables'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -s v -l verbose -d 'Pass on what the ranks print themselves (started ranks only)'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand bench" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -s n -l ranks -l np -l nproc-per-node -d 'Ranks of the job [default: 4; under a launcher, as many as it started]' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -l tokens -d 'Most tokens of a rank' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -l hidden -d 'Elements of a token' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -l top-k -d 'Experts of a token' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -l experts -d 'Experts over all ranks' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -l max-sms -d 'Streaming multiprocessors that a rank\'s communication may use [default: the library\'s choice, shared out where ranks share a GPU]' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -l dtype -d 'Type of the rows that are dispatched. Combined are bf16 for mxfp8, else the same' -r -f -a "bf16\t'bfloat16'
f16\t'IEEE 754 binary16'
f32\t'IEEE 754 binary32'
mxfp8\t'8-bit floats (E4M3) with a scale for each 32'"
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -l shapes -d 'The shapes, in a TOML file: tables [[shape]] with tokens, hidden, top_k, experts, max_sms and dtype, each one value or a list. What a table leaves out is as its flag says' -r -F
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -l transfer -d 'Which groups' -r -f -a "both\t'One after the other'
staged\t'Staged ones only'
zero-copy\t'Zero-copy ones only'"
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -l align -d 'Every expert\'s received rows are padded to a multiple of this many; 0 or 1 = no padding' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -l seed -d 'Seed of routing, tokens, gradients and experts' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -l runtime -d 'Where to run' -r -f -a "auto\t'NVTE_EP_RUNTIME if set; else cuda where there is a fit GPU; else host'
cuda\t'GPUs, through CUDA, NCCL and NCCL EP'
host\t'The host runtime: no GPU needed'"
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -l timeout -d 'Seconds after which the whole run is ended as failed' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -l json -d 'Print machine-readable results instead of tables'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -s v -l verbose -d 'Pass on what the ranks print themselves (started ranks only)'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand warmup" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand launch" -s n -l ranks -l np -l nproc-per-node -d 'Ranks to start' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand launch" -l runtime -d 'Where the program runs [default: NVTE_EP_RUNTIME if set; else host]' -r -f -a "host\t'The host runtime, in place of the CUDA and NCCL libraries too that the program is linked to'
cuda\t'The machine\'s own CUDA and NCCL'"
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand launch" -l grace -d 'Seconds that the other ranks have when one has failed, or a signal has come, before they are ended' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand launch" -l timeout -d 'Seconds after which all ranks are ended' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand launch" -l nnodes -d 'Machines, with a launcher and as many ranks on each' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand launch" -l node-rank -d 'Number of this machine, from 0' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand launch" -l rdzv -d 'Where machine 0 listens, for the other launchers to find it; port 0 is a free one, which is printed' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand launch" -l rdzv-timeout -d 'Seconds to wait for the launchers of the other machines' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand launch" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand doctor" -l runtime -d 'For which runtime [default: NVTE_EP_RUNTIME if set; else cuda]' -r -f -a "host\t'The host runtime, in place of the CUDA and NCCL libraries too that the program is linked to'
cuda\t'The machine\'s own CUDA and NCCL'"
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand doctor" -l run -d 'Also run a step, of two ranks where they find room'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand doctor" -l json -d 'Print machine-readable results; docs/doctor.md has their form'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand doctor" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -s n -l ranks -d 'Ranks of the group; several numbers, a line each' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -l ranks-per-domain -d 'Ranks of an NVLink domain: the GPUs of a machine, or of an NVL72 rack' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -l tokens -d 'Tokens of a rank' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -l hidden -d 'Elements of a token' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -l top-k -d 'Experts of a token' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -l experts -d 'Experts over all ranks' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -l dtype -d 'Data type of tokens' -r -f -a "bf16\t'bfloat16'
f16\t'IEEE 754 binary16'
f32\t'IEEE 754 binary32'"
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -l capacity-factor -d 'Receive rows as a multiple of the mean, T * K [default: as many as any routing needs]' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -l sms -d 'Multiprocessors of a device' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -l link-gb-per-s -d 'What a GPU\'s NVLinks carry in one direction, in gigabytes a second: the least time of a call is told' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -l rail-gb-per-s -d 'What a GPU\'s network adapter carries in one direction, in gigabytes a second' -r
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -l zero-copy -d 'A zero-copy group'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -l json -d 'Print machine-readable results'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plan" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plot" -s o -l output -d 'Folder for the pictures' -r -F
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plot" -l format -d 'How they are written' -r -f -a "svg\t'Scalable vector graphics'
png\t'Pixels'"
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand plot" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand help; and not __fish_seen_subcommand_from run bench warmup launch doctor plan plot help" -f -a "run" -d 'Run a mixture-of-experts layer, forward and backward, and check every output against a reference'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand help; and not __fish_seen_subcommand_from run bench warmup launch doctor plan plot help" -f -a "bench" -d 'Time every call on the device and on the host: staged against zero-copy groups, one library against another, over sweeps of shapes, with the device memory that a group takes'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand help; and not __fish_seen_subcommand_from run bench warmup launch doctor plan plot help" -f -a "warmup" -d 'Compile NCCL EP\'s kernels for the shapes of a job into its cache, before the job needs them'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand help; and not __fish_seen_subcommand_from run bench warmup launch doctor plan plot help" -f -a "launch" -d 'Start a program once a rank, without MPI: by default on the host runtime, which needs no GPU'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand help; and not __fish_seen_subcommand_from run bench warmup launch doctor plan plot help" -f -a "doctor" -d 'Look at what this machine has for expert parallelism, and say what is missing and what to do about it'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand help; and not __fish_seen_subcommand_from run bench warmup launch doctor plan plot help" -f -a "plan" -d 'Compute what a group takes and sends on each rank, without a GPU: receive rows, device memory, bytes over NVLink and rails'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand help; and not __fish_seen_subcommand_from run bench warmup launch doctor plan plot help" -f -a "plot" -d 'Draw what bench and run have printed with --json: time of each call, ratios to another library, bandwidth over tokens, how many rows each expert gets, and received rows with padding of each rank'
complete -c nvte-ep -n "__fish_nvte_ep_using_subcommand help; and not __fish_seen_subcommand_from run bench warmup launch doctor plan plot help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
