//! Memory of the machine, as far as this process may use it: its control groups may allow less than there is.

use std::path::Path;

/// (available, total) bytes.
pub fn memory() -> (usize, usize) {
    memory_below(Path::new("/"))
}

fn memory_below(root: &Path) -> (usize, usize) {
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let meminfo = read(&root.join("proc/meminfo"));
    let machine = (field(&meminfo, "MemAvailable:") * 1024, field(&meminfo, "MemTotal:") * 1024);
    let groups = read(&root.join("proc/self/cgroup"));
    let limits = groups.lines().flat_map(|line| limits_of(root, line));
    limits.fold(machine, |(available, total), (free, limit)| (available.min(free), total.min(limit)))
}

/// The number behind a name that begins a line; 0 without it.
fn field(text: &str, name: &str) -> usize {
    let mut values = text.lines().filter_map(|line| line.strip_prefix(name)?.split_ascii_whitespace().next());
    values.next().and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// What a control group and those around it leave, and allow: a line is `number:controllers:path`.
fn limits_of(root: &Path, line: &str) -> Vec<(usize, usize)> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { return Vec::new() };
    let (hierarchies, limit, used, reclaimable): (&[&str], _, _, _) = if controllers.is_empty() {
        let hierarchies = &["sys/fs/cgroup", "sys/fs/cgroup/unified"];
        (hierarchies, "memory.max", "memory.current", "inactive_file ")
    } else if controllers.split(',').any(|controller| controller == "memory") {
        let hierarchies = &["sys/fs/cgroup/memory"];
        (hierarchies, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
    } else {
        return Vec::new();
    };
    // In a container the path may be that of the machine, while what is mounted begins at the group itself: its file is
    // where the path ends up.
    let groups = hierarchies.iter().flat_map(|hierarchy| {
        let group = Path::new(path.trim_start_matches('/'));
        group.ancestors().map(|group| root.join(hierarchy).join(group)).collect::<Vec<_>>()
    });
    let number = |path: &Path| std::fs::read_to_string(path).ok()?.trim().parse::<usize>().ok();
    groups
        .filter_map(|group| {
            let limit = number(&group.join(limit))?;
            let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
            // The kernel gives pages of files that nobody reads back first.
            let used = number(&group.join(used)).unwrap_or(0).saturating_sub(field(&stat, reclaimable));
            Some((limit.saturating_sub(used), limit))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// A machine of 22 GiB with these files; gives what the process may use, in MiB.
    fn judged(name: &str, files: &[(&str, &str)]) -> (usize, usize) {
        let root = std::env::temp_dir().join(format!("nvte-ep-machine-{name}-{}", std::process::id()));
        let meminfo = ("proc/meminfo", "MemTotal:  23068672 kB\nMemFree: 1 kB\nMemAvailable: 20971520 kB\n");
        for (path, content) in files.iter().chain([&meminfo]) {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        let (available, total) = memory_below(&root);
        std::fs::remove_dir_all(&root).unwrap();
        (available / MIB, total / MIB)
    }

    #[test]
    fn the_smallest_limit_around_the_process_counts() {
        assert_eq!(judged("none", &[("proc/self/cgroup", "0::/\n")]), (20480, 22528));
        let v2 = |name: &str| format!("sys/fs/cgroup/kube/pod/{name}");
        let (max, current, stat) = (v2("memory.max"), v2("memory.current"), v2("memory.stat"));
        let files = [
            ("proc/self/cgroup", "0::/kube/pod/app\n"),
            ("sys/fs/cgroup/kube/pod/app/memory.max", "max\n"),
            (&*max, "125829120\n"),
            (&*current, "73400320\n"),
            (&*stat, "anon 1\ninactive_file 10485760\nactive_file 5\n"),
            ("sys/fs/cgroup/kube/memory.max", "1073741824\n"),
        ];
        // 120 MiB, of which 70 are used, 10 of them by files.
        assert_eq!(judged("v2", &files), (60, 120));
    }

    #[test]
    fn a_container_sees_its_own_group_at_the_root() {
        let files = [
            ("proc/self/cgroup", "12:cpu,cpuacct:/docker/1234\n9:hugetlb,memory:/docker/1234\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "104857600\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 20971520\n"),
        ];
        assert_eq!(judged("v1", &files), (256 - 80, 256));
        // Without a limit the number is larger than any memory.
        let unlimited = [files[0], ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")];
        assert_eq!(judged("v1-unlimited", &unlimited), (20480, 22528));
    }
}
