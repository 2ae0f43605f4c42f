//! Pictures of what `bench` and `run` report: which there are. [`mod@draw`] draws them.

mod draw;

use crate::Outcome;
use crate::args::PlotArgs;
use crate::bench::report::{BenchReport, CaseResult, GroupResult};
use crate::report::{RankReport, RunReport, StepReport};
use clap::ValueEnum;
use draw::{Bars, Heat, Lines, Picture};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// How a picture is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Scalable vector graphics.
    Svg,
    /// Pixels.
    Png,
}

/// A picture and the stem of its file.
type Named = (String, Picture);

/// Reads reports and writes their pictures.
pub fn run(args: &PlotArgs) -> Outcome<ExitCode> {
    let mut pictures = Vec::new();
    for file in &args.reports {
        let told = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        let text = std::fs::read_to_string(file).map_err(|error| told(&error))?;
        let stem = file.file_stem().map_or_else(String::new, |stem| format!("{}_", stem.to_string_lossy()));
        let found = of_text(&text).map_err(|error| told(&error))?;
        pictures.extend(found.into_iter().map(|(name, picture)| (format!("{stem}{name}"), picture)));
    }
    let files = write(&pictures, &args.output, &args.format)?;
    let text: String = files.iter().map(|path| format!("{}\n", path.display())).collect();
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| format!("cannot write to standard output: {error}"))?;
    Ok(ExitCode::SUCCESS)
}

/// The pictures of a report of either command.
fn of_text(text: &str) -> Outcome<Vec<Named>> {
    let value: serde_json::Value = serde_json::from_str(text)?;
    if value.get("cases").is_some() {
        return Ok(of_bench(&serde_json::from_value(value)?));
    }
    if value.get("ranks").is_some() {
        return Ok(of_run(&serde_json::from_value(value)?));
    }
    Err("neither `nvte-ep bench --json` nor `nvte-ep run --json` has printed this".into())
}

/// Writes pictures into a folder, which is made if it is not there; their files.
pub fn write(pictures: &[Named], folder: &Path, formats: &[Format]) -> Outcome<Vec<PathBuf>> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut files = Vec::new();
    for (name, picture) in pictures {
        for format in formats {
            let (extension, bytes) = match format {
                Format::Svg => ("svg", picture.svg()?.into_bytes()),
                Format::Png => ("png", picture.png()?),
            };
            let file = folder.join(format!("{name}.{extension}"));
            std::fs::write(&file, bytes).map_err(|error| format!("{}: {error}", file.display()))?;
            files.push(file);
        }
    }
    Ok(files)
}

/// All of a bench: times and, with another library, ratios of each case, loads and rows, and bandwidths over tokens.
pub fn of_bench(report: &BenchReport) -> Vec<Named> {
    let mut pictures = Vec::new();
    for (number, case) in report.cases.iter().enumerate() {
        let (number, title) = (number + 1, case.title());
        pictures.push((format!("time_{number}"), Picture::Bars(times(case, &title))));
        if case.groups.iter().flat_map(|group| &group.calls).any(|call| call.device_ratio.is_some()) {
            pictures.push((format!("ratio_{number}"), Picture::Bars(ratios(case, &title))));
        }
        let local = case.case.problem.local_experts();
        let rows = case.expert_rows.chunks(local).map(|rows| rows.iter().map(|&rows| rows as f64).collect()).collect();
        pictures.push((format!("load_{number}"), load(&title, "rank", rows)));
        pictures.push((format!("rows_{number}"), received(&title, &case.received, &case.padding)));
    }
    pictures.extend(bandwidths(&report.cases));
    pictures
}

/// Of a run: how many rows each expert got, and what each rank received.
pub fn of_run(report: &RunReport) -> Vec<Named> {
    let problem = &report.problem;
    let title = format!(
        "{} ranks, up to {} tokens each, top-k {} of {} experts, all steps",
        problem.ranks, problem.tokens, problem.top_k, problem.experts
    );
    let of_rank = |rank: &RankReport| -> Vec<f64> {
        let mut rows = vec![0.0; problem.local_experts()];
        for step in &rank.steps {
            rows.iter_mut().zip(&step.counts).for_each(|(sum, &count)| *sum += f64::from(count));
        }
        rows
    };
    let total = |of: fn(&StepReport) -> usize| -> Vec<usize> {
        report.ranks.iter().map(|rank| rank.steps.iter().map(of).sum()).collect()
    };
    vec![
        ("load".into(), load(&title, "rank", report.ranks.iter().map(of_rank).collect())),
        ("rows".into(), received(&title, &total(|step| step.received), &total(|step| step.padding))),
    ]
}

fn names_of_calls(case: &CaseResult) -> Vec<String> {
    case.groups.first().map_or_else(Vec::new, |group| group.calls.iter().map(|call| call.call.clone()).collect())
}

fn times(case: &CaseResult, title: &str) -> Bars {
    let series =
        |group: &GroupResult| (group.name(), group.calls.iter().map(|call| Some(call.device_us.median)).collect());
    Bars {
        title: title.into(),
        unit: "us on the device, median of the slowest rank".into(),
        categories: names_of_calls(case),
        series: case.groups.iter().map(series).collect(),
        stacked: false,
        line: None,
    }
}

fn ratios(case: &CaseResult, title: &str) -> Bars {
    let own = case.groups.iter().filter(|group| group.calls.iter().any(|call| call.device_ratio.is_some()));
    let series = own.flat_map(|group| {
        let device = group.calls.iter().map(|call| call.device_ratio).collect();
        let host = group.calls.iter().map(|call| call.host_ratio).collect();
        [(format!("{}, device", group.name()), device), (format!("{}, host", group.name()), host)]
    });
    Bars {
        title: title.into(),
        unit: "time as a share of the other library's; below 1 is faster".into(),
        categories: names_of_calls(case),
        series: series.collect(),
        stacked: false,
        line: Some(1.0),
    }
}

fn load(title: &str, of: &str, rows: Vec<Vec<f64>>) -> Picture {
    Picture::Heat(Heat {
        title: title.into(),
        unit: "rows of each expert".into(),
        across: "local expert".into(),
        down: of.into(),
        rows,
    })
}

fn received(title: &str, received: &[usize], padding: &[usize]) -> Picture {
    let values = |rows: &[usize]| rows.iter().map(|&rows| Some(rows as f64)).collect();
    Picture::Bars(Bars {
        title: title.into(),
        unit: "rows that a rank receives".into(),
        categories: (0..received.len()).map(|rank| format!("rank {rank}")).collect(),
        series: vec![("received".into(), values(received)), ("padding".into(), values(padding))],
        stacked: true,
        line: None,
    })
}

/// The calls of [`bandwidths`]: dispatch and combine.
const FORWARD: [usize; 2] = [1, 2];

/// GB/s over tokens, where cases differ in tokens: a picture for each number of ranks, type, and so on.
fn bandwidths(cases: &[CaseResult]) -> Vec<Named> {
    let alike = |a: &CaseResult, b: &CaseResult| {
        let mut other = b.case.clone();
        other.problem.tokens = a.case.problem.tokens;
        a.case == other
    };
    let mut families: Vec<Vec<&CaseResult>> = Vec::new();
    for case in cases {
        match families.iter_mut().find(|family| alike(family[0], case)) {
            Some(family) => family.push(case),
            None => families.push(vec![case]),
        }
    }
    families.retain(|family| family.len() > 1);
    let picture = |(number, mut family): (usize, Vec<&CaseResult>)| {
        family.sort_by_key(|case| case.case.problem.tokens);
        let first = family[0];
        let mut series = Vec::new();
        for (group, name) in first.groups.iter().map(GroupResult::name).enumerate() {
            for (call, of_call) in names_of_calls(first).iter().enumerate() {
                let point = |case: &&CaseResult| {
                    let gb_per_s = case.groups.get(group)?.calls.get(call)?.gb_per_s?;
                    Some((case.case.problem.tokens as f64, gb_per_s))
                };
                let points: Vec<(f64, f64)> = family.iter().filter_map(point).collect();
                if points.len() == family.len() && FORWARD.contains(&call) {
                    series.push((format!("{of_call}, {name}"), points));
                }
            }
        }
        let title = first.title().replace(&format!("{} tokens each, ", first.case.problem.tokens), "");
        let lines =
            Lines { title, across: "tokens of a rank".into(), unit: "GB/s, rows without padding".into(), series };
        (format!("bandwidth_{}", number + 1), Picture::Lines(lines))
    };
    families.into_iter().enumerate().map(picture).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::report;

    fn names(pictures: &[Named]) -> Vec<&str> {
        pictures.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn a_bench_has_its_pictures() {
        let (mut bench, _) = report("same");
        assert_eq!(names(&of_bench(&bench)), ["time_1", "ratio_1", "load_1", "rows_1"]);
        let mut more = bench.cases[0].clone();
        more.case.problem.tokens = 20;
        bench.cases.push(more);
        let pictures = of_bench(&bench);
        assert_eq!(names(&pictures)[8..], ["bandwidth_1"]);
        let Picture::Lines(lines) = &pictures[8].1 else { panic!() };
        assert_eq!(lines.series.len(), 3 * 2, "dispatch and combine of three groups");
        assert_eq!(lines.series[0].1.iter().map(|(tokens, _)| *tokens).collect::<Vec<_>>(), [10.0, 20.0]);
        for (name, picture) in pictures {
            let svg = picture.svg().unwrap();
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{name}");
            let png = picture.png().unwrap();
            assert!(png.starts_with(b"\x89PNG") && png.len() > 2000, "{name}: {}", png.len());
        }
    }

    #[test]
    fn what_is_no_report_is_refused() {
        assert!(of_text("{}").unwrap_err().to_string().starts_with("neither `nvte-ep bench --json`"));
        assert!(of_text("{").is_err());
    }
}
