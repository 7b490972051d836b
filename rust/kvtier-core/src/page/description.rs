//! What a page says of itself: whose it is, and which figures its words are.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{owner::Owner, since_1970};
use crate::manager::{Figure, Histogram, Snapshot, Tell, TierSnapshot};

/// The description in a page.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// The version of kvtier that wrote it.
    pub version: String,
    /// Whose it is.
    pub owner: Owner,
    /// When the manager was made, in seconds since 1970.
    pub opened: u64,
    /// Bytes of a slot of the primary tier.
    pub slot_bytes: u64,
    /// Upper ends, in seconds, of the buckets of every latency; a last one has none.
    pub latency_buckets: Vec<f64>,
    /// The secondary tiers.
    pub tiers: Vec<TierDescription>,
    /// The primary tier's figures, in the order of their words.
    primary: Vec<Field>,
}

/// What does not change of a tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TierDescription {
    /// Its name.
    pub name: String,
    /// What it keeps chunks on.
    pub medium: String,
    /// Where.
    pub locality: String,
    /// The directory that it keeps them in, if it does and that is text.
    pub directory: Option<String>,
    /// Its figures, in the order of their words.
    figures: Vec<Field>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Field {
    name: String,
    #[serde(flatten)]
    kind: Kind,
}

/// How many words a figure has, and what they are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Kind {
    /// One: the number.
    Count,
    /// One: a double.
    Amount,
    /// One: 0 or 1.
    Flag,
    /// One: which of the names.
    Choice { of: Vec<String> },
    /// One a name.
    Counts { of: Vec<String> },
    /// One a bucket, then the sum, a double.
    Latency,
}

impl Description {
    /// Describes pages of a manager with these figures.
    pub(crate) fn of(snapshot: &Snapshot, slot_bytes: usize) -> Self {
        let tiers = snapshot.tiers.iter().map(TierDescription::of);
        let bounds = Histogram::bounds();
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            owner: Owner::here(),
            opened: since_1970().as_secs(),
            slot_bytes: slot_bytes as u64,
            latency_buckets: bounds.into_iter().filter(|bound| bound.is_finite()).collect(),
            tiers: tiers.collect(),
            primary: fields(|tell| snapshot.primary.each(tell)),
        }
    }

    /// Words of figures in a record.
    pub(super) fn words(&self) -> usize {
        let tiers = self.tiers.iter().map(|tier| self.words_of(&tier.figures));
        self.words_of(&self.primary) + tiers.sum::<usize>()
    }

    fn words_of(&self, fields: &[Field]) -> usize {
        fields.iter().map(|field| field.kind.words(self.buckets())).sum()
    }

    fn buckets(&self) -> usize {
        self.latency_buckets.len() + 1
    }

    /// Tells the figures of the primary tier, or of a secondary one by its number, out of the
    /// words of a record.
    pub(super) fn each(&self, tier: Option<usize>, words: &[u64], tell: &mut Tell<'_>) {
        let (fields, first) = match tier {
            None => (&self.primary, 0),
            Some(number) => {
                let before = self.tiers[..number].iter().map(|tier| self.words_of(&tier.figures));
                let first = self.words_of(&self.primary) + before.sum::<usize>();
                (&self.tiers[number].figures, first)
            }
        };
        let mut words = &words[first..];
        for field in fields {
            let (own, rest) = words.split_at(field.kind.words(self.buckets()));
            field.kind.tell(&field.name, own, tell);
            words = rest;
        }
    }
}

impl TierDescription {
    fn of(tier: &TierSnapshot) -> Self {
        Self {
            name: tier.name.clone(),
            medium: tier.medium.as_str().to_owned(),
            locality: tier.locality.as_str().to_owned(),
            directory: tier.directory.as_deref().and_then(Path::to_str).map(str::to_owned),
            figures: fields(|tell| tier.each(tell)),
        }
    }
}

impl Kind {
    fn of(figure: Figure<'_>) -> Self {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        match figure {
            Figure::Count(_) => Self::Count,
            Figure::Amount(_) => Self::Amount,
            Figure::Flag(_) => Self::Flag,
            Figure::Choice { of, .. } => Self::Choice { of: owned(of) },
            Figure::Counts { of, .. } => Self::Counts { of: owned(of) },
            Figure::Latency { .. } => Self::Latency,
        }
    }

    fn words(&self, buckets: usize) -> usize {
        match self {
            Self::Count | Self::Amount | Self::Flag | Self::Choice { .. } => 1,
            Self::Counts { of } => of.len(),
            Self::Latency => buckets + 1,
        }
    }

    fn tell(&self, name: &str, words: &[u64], tell: &mut Tell<'_>) {
        match self {
            Self::Count => tell(name, Figure::Count(words[0])),
            Self::Amount => tell(name, Figure::Amount(f64::from_bits(words[0]))),
            Self::Flag => tell(name, Figure::Flag(words[0] != 0)),
            Self::Choice { of } => {
                let of: Vec<&str> = of.iter().map(String::as_str).collect();
                tell(name, Figure::Choice { at: words[0] as usize, of: &of });
            }
            Self::Counts { of } => {
                let of: Vec<&str> = of.iter().map(String::as_str).collect();
                tell(name, Figure::Counts { counts: words, of: &of });
            }
            Self::Latency => {
                let (counts, sum) = words.split_at(words.len() - 1);
                tell(name, Figure::Latency { counts, sum: f64::from_bits(sum[0]) });
            }
        }
    }
}

/// The fields of figures that are told.
fn fields(each: impl FnOnce(&mut Tell<'_>)) -> Vec<Field> {
    let mut fields = Vec::new();
    each(&mut |name, figure| {
        fields.push(Field { name: name.to_owned(), kind: Kind::of(figure) });
    });
    fields
}

/// The words of figures that are told, in the order of their fields.
pub(super) fn words_of(snapshot: &Snapshot, words: &mut Vec<u64>) {
    let mut tell = |_: &str, figure: Figure<'_>| match figure {
        Figure::Count(count) => words.push(count),
        Figure::Amount(amount) => words.push(amount.to_bits()),
        Figure::Flag(flag) => words.push(u64::from(flag)),
        Figure::Choice { at, .. } => words.push(at as u64),
        Figure::Counts { counts, .. } => words.extend_from_slice(counts),
        Figure::Latency { counts, sum } => {
            words.extend_from_slice(counts);
            words.push(sum.to_bits());
        }
    };
    snapshot.primary.each(&mut tell);
    snapshot.tiers.iter().for_each(|tier| tier.each(&mut tell));
}
