//! Bars, lines and heat maps, as SVG and as PNG.

use crate::Outcome;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};
use std::sync::Once;

const SIZE: (u32, u32) = (1000, 480);
const FONT: &str = "sans-serif";
/// Distinct also for those who see no red or green (Okabe and Ito).
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(0, 0, 0),
    RGBColor(150, 150, 150),
];
const GREY: RGBColor = RGBColor(110, 110, 110);

/// Values of several series for the same names.
#[derive(Debug, Clone, PartialEq)]
pub struct Bars {
    /// Above the picture.
    pub title: String,
    /// What the values are.
    pub unit: String,
    /// The names.
    pub categories: Vec<String>,
    /// A name and its values.
    pub series: Vec<(String, Vec<Option<f64>>)>,
    /// Whether the series' values add up.
    pub stacked: bool,
    /// A value to compare with.
    pub line: Option<f64>,
}

/// Points of several series.
#[derive(Debug, Clone, PartialEq)]
pub struct Lines {
    /// Above the picture.
    pub title: String,
    /// What x is.
    pub across: String,
    /// What y is.
    pub unit: String,
    /// A name and its points.
    pub series: Vec<(String, Vec<(f64, f64)>)>,
}

/// A value for each place of a grid.
#[derive(Debug, Clone, PartialEq)]
pub struct Heat {
    /// Above the picture.
    pub title: String,
    /// What the values are.
    pub unit: String,
    /// What the columns are.
    pub across: String,
    /// What the rows are.
    pub down: String,
    /// The rows.
    pub rows: Vec<Vec<f64>>,
}

/// A picture.
#[derive(Debug, Clone, PartialEq)]
pub enum Picture {
    /// See [`Bars`].
    Bars(Bars),
    /// See [`Lines`].
    Lines(Lines),
    /// See [`Heat`].
    Heat(Heat),
}

type Area<'a, B> = DrawingArea<B, Shift>;
type Drawn = Result<(), String>;

impl Picture {
    /// As SVG.
    pub fn svg(&self) -> Outcome<String> {
        let mut text = String::new();
        self.draw(&SVGBackend::with_string(&mut text, SIZE).into_drawing_area())?;
        Ok(text)
    }

    /// As PNG.
    pub fn png(&self) -> Outcome<Vec<u8>> {
        let (width, height) = SIZE;
        let mut pixels = vec![0; (width * height * 3) as usize];
        self.draw(&BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area())?;
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width, height);
        encoder.set_color(png::ColorType::Rgb);
        let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&pixels));
        written.map_err(|error| error.to_string())?;
        Ok(file)
    }

    fn draw<B: DrawingBackend>(&self, area: &Area<'_, B>) -> Drawn {
        static FONTS: Once = Once::new();
        FONTS.call_once(|| {
            let font = include_bytes!("../../font/roboto.ttf");
            assert!(register_font(FONT, FontStyle::Normal, font).is_ok(), "font/roboto.ttf is a font");
        });
        area.fill(&WHITE).map_err(told)?;
        match self {
            Self::Bars(bars) => bars.draw(area),
            Self::Lines(lines) => lines.draw(area),
            Self::Heat(heat) => heat.draw(area),
        }?;
        area.present().map_err(told)
    }
}

fn told(error: impl std::fmt::Display) -> String {
    format!("cannot draw: {error}")
}

/// Room above all values, never none.
fn top(values: impl Iterator<Item = f64>) -> f64 {
    let most = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
    if most > 0.0 { most * 1.08 } else { 1.0 }
}

fn text_style(size: i32, color: &RGBColor, h: HPos, v: VPos) -> TextStyle<'_> {
    TextStyle::from((FONT, size).into_font()).color(color).pos(Pos::new(h, v))
}

/// The title and, below it, what the values are.
fn headings<B: DrawingBackend>(area: &Area<'_, B>, title: &str, unit: &str) -> Drawn {
    let heading = |text: &str, y: i32, size: i32, color: &RGBColor| {
        area.draw(&Text::new(text.to_owned(), (16, y), text_style(size, color, HPos::Left, VPos::Top))).map_err(told)
    };
    heading(title, 12, 16, &BLACK)?;
    heading(unit, 34, 14, &GREY)
}

/// Names of series with their colours, in a row below the picture.
fn legend<B: DrawingBackend>(area: &Area<'_, B>, names: &[&str]) -> Drawn {
    let (width, height) = area.dim_in_pixel();
    let columns = names.len().clamp(1, 4);
    let lines = names.len().div_ceil(columns) as i32;
    for (index, name) in names.iter().enumerate() {
        let x = 70 + (index % columns) as i32 * ((width as i32 - 80) / columns as i32);
        let y = height as i32 - 18 * lines + 18 * (index / columns) as i32 - 4;
        let colour = COLOURS[index % COLOURS.len()].filled();
        area.draw(&Rectangle::new([(x, y), (x + 12, y + 12)], colour)).map_err(told)?;
        let style = text_style(14, &BLACK, HPos::Left, VPos::Center);
        area.draw(&Text::new((*name).to_owned(), (x + 18, y + 6), style)).map_err(told)?;
    }
    Ok(())
}

/// Pixels that [`legend`] takes.
const fn legend_height(names: usize) -> u32 {
    18 * names.div_ceil(4) as u32 + 8
}

fn number(value: &f64) -> String {
    match value.abs() {
        large if large >= 1000.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.0}"),
        small if small >= 1.0 || small == 0.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

impl Bars {
    fn draw<B: DrawingBackend>(&self, area: &Area<'_, B>) -> Drawn {
        headings(area, &self.title, &self.unit)?;
        let names: Vec<&str> = self.series.iter().map(|(name, _)| name.as_str()).collect();
        legend(area, &names)?;
        let count = self.categories.len();
        let value = |series: &(String, Vec<Option<f64>>), at: usize| series.1.get(at).copied().flatten().unwrap_or(0.0);
        let most = match self.stacked {
            true => top((0..count).map(|at| self.series.iter().map(|series| value(series, at)).sum())),
            false => {
                top(self.series.iter().flat_map(|series| (0..count).map(move |at| value(series, at))).chain(self.line))
            }
        };
        let mut chart = ChartBuilder::on(area)
            .margin_top(58)
            .margin_right(16)
            .margin_bottom(24 + legend_height(names.len()))
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..count.max(1) as f64, 0.0..most)
            .map_err(told)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(0)
            .light_line_style(WHITE.mix(0.0))
            .y_label_style((FONT, 13).into_font())
            .y_label_formatter(&number)
            .axis_style(GREY)
            .draw()
            .map_err(told)?;
        let width = 0.8 / if self.stacked { 1.0 } else { self.series.len().max(1) as f64 };
        for at in 0..count {
            let mut below = 0.0;
            for (index, series) in self.series.iter().enumerate() {
                let left = at as f64 + 0.1 + if self.stacked { 0.0 } else { width * index as f64 };
                let height = value(series, at);
                let corners = [(left, below), (left + width * 0.94, below + height)];
                let colour = COLOURS[index % COLOURS.len()].filled();
                chart.draw_series([Rectangle::new(corners, colour)]).map_err(told)?;
                below += if self.stacked { height } else { 0.0 };
            }
            let (x, y) = chart.plotting_area().map_coordinate(&(at as f64 + 0.5, 0.0));
            let style = text_style(14, &BLACK, HPos::Center, VPos::Top);
            area.draw(&Text::new(self.categories[at].clone(), (x, y + 6), style)).map_err(told)?;
        }
        if let Some(line) = self.line {
            let ends = [(0.0, line), (count.max(1) as f64, line)];
            chart.draw_series(LineSeries::new(ends, BLACK.stroke_width(1))).map_err(told)?;
        }
        Ok(())
    }
}

impl Lines {
    fn draw<B: DrawingBackend>(&self, area: &Area<'_, B>) -> Drawn {
        headings(area, &self.title, &self.unit)?;
        let names: Vec<&str> = self.series.iter().map(|(name, _)| name.as_str()).collect();
        legend(area, &names)?;
        let points = || self.series.iter().flat_map(|(_, points)| points);
        let least = points().map(|point| point.0).fold(f64::INFINITY, f64::min).max(1.0);
        let most = points().map(|point| point.0).fold(least, f64::max);
        let mut chart = ChartBuilder::on(area)
            .margin_top(58)
            .margin_right(24)
            .margin_bottom(legend_height(names.len()))
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(
                (least..most.max(least * 2.0)).log_scale().base(2.0),
                0.0..top(points().map(|point| point.1)),
            )
            .map_err(told)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE.mix(0.0))
            .label_style((FONT, 13).into_font())
            .x_desc(self.across.clone())
            .axis_desc_style((FONT, 14).into_font())
            .x_label_formatter(&number)
            .y_label_formatter(&number)
            .axis_style(GREY)
            .draw()
            .map_err(told)?;
        for (index, (_, points)) in self.series.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2))).map_err(told)?;
            let dots = points.iter().map(|&point| Circle::new(point, 3, colour.filled()));
            chart.draw_series(dots).map_err(told)?;
        }
        Ok(())
    }
}

impl Heat {
    fn draw<B: DrawingBackend>(&self, area: &Area<'_, B>) -> Drawn {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let most = self.rows.iter().flatten().copied().fold(0.0, f64::max);
        let least = self.rows.iter().flatten().copied().fold(f64::INFINITY, f64::min).min(most);
        headings(area, &self.title, &format!("{}: {} (light) to {} (dark)", self.unit, number(&least), number(&most)))?;
        let mut chart = ChartBuilder::on(area)
            .margin_top(58)
            .margin_right(24)
            .margin_bottom(8)
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..columns as f64, self.rows.len().max(1) as f64..0.0)
            .map_err(told)?;
        for (y, row) in self.rows.iter().enumerate() {
            for (x, &value) in row.iter().enumerate() {
                let share = if most > 0.0 { value / most } else { 0.0 };
                let fade = |full: u8| (255.0 - (255.0 - f64::from(full)) * share) as u8;
                let colour = RGBColor(fade(0), fade(70), fade(130));
                let corners = [(x as f64, y as f64), (x as f64 + 0.96, y as f64 + 0.96)];
                chart.draw_series([Rectangle::new(corners, colour.filled())]).map_err(told)?;
            }
        }
        // A name for each row and column, or for some where there are many.
        let style = |h, v| text_style(13, &BLACK, h, v);
        let plotting = chart.plotting_area();
        for x in (0..columns).step_by(columns.div_ceil(32)) {
            let (px, py) = plotting.map_coordinate(&(x as f64 + 0.5, self.rows.len().max(1) as f64));
            area.draw(&Text::new(x.to_string(), (px, py + 4), style(HPos::Center, VPos::Top))).map_err(told)?;
        }
        for y in (0..self.rows.len()).step_by(self.rows.len().div_ceil(24).max(1)) {
            let (px, py) = plotting.map_coordinate(&(0.0, y as f64 + 0.5));
            area.draw(&Text::new(format!("{} {y}", self.down), (px - 6, py), style(HPos::Right, VPos::Center)))
                .map_err(told)?;
        }
        let (px, py) = plotting.map_coordinate(&(columns as f64 / 2.0, self.rows.len().max(1) as f64));
        area.draw(&Text::new(self.across.clone(), (px, py + 20), style(HPos::Center, VPos::Top))).map_err(told)
    }
}
