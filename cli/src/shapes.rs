//! Shapes of layers: the lists of `bench` and `warmup`, and the file of `warmup --shapes`.

use crate::bench::RowType;
use clap::Args;
use serde::Deserialize;
use std::path::Path;
use toml::Spanned;

/// Lists of shapes, of `bench` and `warmup`: each combination is a case.
#[derive(Debug, Clone, Args)]
pub struct ShapeArgs {
    /// Most tokens of a rank.
    #[arg(long, value_name = "T,..", value_delimiter = ',', default_value = "512")]
    pub tokens: Vec<usize>,
    /// Elements of a token.
    #[arg(long, value_name = "H,..", value_delimiter = ',', default_value = "1024")]
    pub hidden: Vec<usize>,
    /// Experts of a token.
    #[arg(long, value_name = "K,..", value_delimiter = ',', default_value = "4")]
    pub top_k: Vec<usize>,
    /// Experts over all ranks.
    #[arg(long, value_name = "E,..", value_delimiter = ',', default_value = "16")]
    pub experts: Vec<usize>,
    /// Streaming multiprocessors that a rank's communication may use [default: the library's choice, shared out where
    /// ranks share a GPU].
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub max_sms: Vec<usize>,
    /// Type of the rows that are dispatched. Combined are bf16 for mxfp8, else the same.
    #[arg(long, value_enum, value_name = "TYPE,..", value_delimiter = ',', default_value = "bf16")]
    pub dtype: Vec<RowType>,
    /// What the lists are from a file for, and where it says so.
    #[arg(skip)]
    place: Place,
}

/// Where a table of a file stands, and which of its lines have which key.
#[derive(Debug, Clone, Default)]
struct Place {
    file: String,
    table: usize,
    keys: Vec<(&'static str, usize)>,
}

/// A file of shapes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    shape: Vec<Spanned<Shape>>,
}

/// A table of it: as the flags; a key that it leaves out is as the flag is.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shape {
    tokens: Option<Spanned<List<usize>>>,
    hidden: Option<Spanned<List<usize>>>,
    top_k: Option<Spanned<List<usize>>>,
    experts: Option<Spanned<List<usize>>>,
    max_sms: Option<Spanned<List<usize>>>,
    dtype: Option<Spanned<List<RowType>>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "must be one value, as its flag takes it, or a list of them")]
enum List<T> {
    One(T),
    Many(Vec<T>),
}

impl ShapeArgs {
    /// The shapes of a file, in its order.
    ///
    /// # Errors
    /// The line, the key and what is wrong.
    pub fn read(&self, path: &Path) -> Result<Vec<Self>, String> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| format!("--shapes {file}: {error}"))?;
        let parsed: File = toml::from_str(&text).map_err(|error| at(&file, &text, &error))?;
        if parsed.shape.is_empty() {
            return Err(format!("{file}: there must be a table [[shape]]"));
        }
        parsed.shape.into_iter().map(|shape| self.with(shape, &file, &text)).collect()
    }

    fn with(&self, table: Spanned<Shape>, file: &str, text: &str) -> Result<Self, String> {
        let mut place = Place { file: file.to_owned(), table: line(text, table.span().start), keys: Vec::new() };
        let Shape { tokens, hidden, top_k, experts, max_sms, dtype } = table.into_inner();
        let mut numbers = |key, flag: &Vec<usize>, own| place.take(text, key, flag, own);
        Ok(Self {
            tokens: numbers("tokens", &self.tokens, tokens)?,
            hidden: numbers("hidden", &self.hidden, hidden)?,
            top_k: numbers("top_k", &self.top_k, top_k)?,
            experts: numbers("experts", &self.experts, experts)?,
            max_sms: numbers("max_sms", &self.max_sms, max_sms)?,
            dtype: place.take(text, "dtype", &self.dtype, dtype)?,
            place,
        })
    }

    /// An error about the flags of these lists, with the line and the key where they come from a file.
    pub fn placed(&self, error: String) -> String {
        let Place { file, table, keys } = &self.place;
        if file.is_empty() {
            return error;
        }
        let flag = error.strip_prefix("--").and_then(|rest| rest.split_once(' '));
        let key = flag.map(|(flag, rest)| (flag.replace('-', "_"), rest));
        match key.and_then(|(flag, rest)| keys.iter().find(|(key, _)| *key == flag).map(|found| (found, rest))) {
            Some(((key, line), rest)) => format!("{file}, line {line}: {key} {rest}"),
            None => format!("{file}, line {table}: {error}"),
        }
    }
}

impl Place {
    fn take<T: Clone>(
        &mut self,
        text: &str,
        key: &'static str,
        flag: &[T],
        own: Option<Spanned<List<T>>>,
    ) -> Result<Vec<T>, String> {
        let Some(own) = own else { return Ok(flag.to_vec()) };
        let line = line(text, own.span().start);
        self.keys.push((key, line));
        match own.into_inner() {
            List::One(value) => Ok(vec![value]),
            List::Many(values) if values.is_empty() => {
                Err(format!("{}, line {line}: {key} must name something", self.file))
            }
            List::Many(values) => Ok(values),
        }
    }
}

/// The number of the line in which the byte `at` is.
fn line(text: &str, at: usize) -> usize {
    1 + text.bytes().take(at).filter(|byte| *byte == b'\n').count()
}

/// What the parser says, with the line and, where the line has one, its key.
fn at(file: &str, text: &str, error: &toml::de::Error) -> String {
    let Some(span) = error.span() else { return format!("{file}: {}", error.message()) };
    let number = line(text, span.start);
    let key = text.lines().nth(number - 1).and_then(|line| line.split_once('=')).map(|(key, _)| key.trim());
    let key = key.map_or(String::new(), |key| format!("{key}: "));
    format!("{file}, line {number}: {key}{}", error.message().replace('\n', " "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        shapes: ShapeArgs,
    }

    fn read(text: &str) -> Result<Vec<ShapeArgs>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.toml");
        std::fs::write(&path, text).unwrap();
        let found = Flags::parse_from(["x", "--hidden=64", "--top-k=2"]).shapes.read(&path);
        found.map_err(|error| error.replace(&path.display().to_string(), "s.toml"))
    }

    #[test]
    fn what_a_table_leaves_out_is_the_flag() {
        let text = "[[shape]]\ntokens = [16, 32]\ndtype = 'mxfp8'\n# comment\n[[shape]]\nhidden = 128\nmax_sms = 8\n";
        let [first, second]: [ShapeArgs; 2] = read(text).unwrap().try_into().unwrap();
        assert_eq!((first.tokens, first.hidden, first.dtype), (vec![16, 32], vec![64], vec![RowType::Mxfp8]));
        assert_eq!((&second.tokens, &second.hidden, &second.top_k), (&vec![512], &vec![128], &vec![2]));
        assert_eq!(second.max_sms, [8]);
        let ends = |error: &str, expected: &str| {
            let text = second.placed(error.into());
            assert!(text.ends_with(&format!("/s.toml, {expected}")), "{text}");
        };
        ends("--hidden must be even, got 3", "line 6: hidden must be even, got 3");
        ends("--max-sms must be 1", "line 7: max_sms must be 1");
        ends("--top-k must be 1", "line 5: --top-k must be 1");
    }

    #[test]
    fn errors_name_line_and_key() {
        for (text, expected) in [
            ("", "s.toml, line 1: missing field `shape`"),
            ("shape = []", "s.toml: there must be a table [[shape]]"),
            (
                "[[shape]]\n\nhiden = 4\n",
                "s.toml, line 3: hiden: unknown field `hiden`, expected one of `tokens`, `hidden`",
            ),
            (
                "[[shape]]\ntokens = 'x'\n",
                "s.toml, line 2: tokens: must be one value, as its flag takes it, or a list of them",
            ),
            (
                "[[shape]]\ntokens = -1\n",
                "s.toml, line 2: tokens: must be one value, as its flag takes it, or a list of them",
            ),
            (
                "[[shape]]\ndtype = ['f64']\n",
                "s.toml, line 2: dtype: must be one value, as its flag takes it, or a list of them",
            ),
            ("[[shape]]\ntop_k = []\n", "s.toml, line 2: top_k must name something"),
            ("[[shape]]\ntokens 5\n", "s.toml, line 2: "),
            ("steps = 3\n[[shape]]\n", "s.toml, line 1: steps: unknown field `steps`"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
        let error = Flags::parse_from(["x"]).shapes.read(Path::new("/nowhere.toml")).unwrap_err();
        assert!(error.starts_with("--shapes /nowhere.toml: No such file"), "{error}");
    }
}
