//! How soon are chunks of a class used again? Estimated while they live, and ranked.
//!
//! # Estimate
//! A *life* of a chunk runs from one use to the next, in one class. It ends with a hit, or is
//! given up (its ghost is forgotten) without one. Ages fall into log-spaced buckets, and the
//! hazard of a bucket is the actuary's: hits in the bucket over lives that entered it, a life
//! that is still in it, or was given up in it, counting as half a one. Lives that go on are
//! counted afresh for every estimate (the *census*), so what has not come back yet is exposure
//! and not silence; lives that ended are kept as sums that halve every [`Hazards::half_life`].
//!
//! # Smoothing
//! A class with few lives believes its elders: the class at all depths (its neighbours in gap
//! counting half), then its number of uses alone, then all chunks, then the prior, which says
//! that reuse is as likely in each octave of age: that is LRU's belief, so an index that has
//! seen nothing behaves as LRU.
//!
//! # Rank
//! The Gittins index of a class at an age: over all horizons, the greatest ratio of the chance
//! of a hit within the horizon to the time the slot is occupied until the hit or the horizon.
//! J. Gittins, "Bandit processes and dynamic allocation indices", 1979; for caches, it is the
//! best order there is when reuse times of chunks are independent.

use super::class::{CLASSES, Class};

/// Age buckets: two an octave over twelve octaves, six on either side of the capacity. Outside,
/// a chunk has just been used, or is past hope.
pub(super) const AGES: usize = 24;
/// Octaves of age below the capacity that are told apart.
const OCTAVES_BELOW: u32 = 6;
/// Lives that a class needs to be believed as much as its elder. Chunks of one request live and
/// die together, about 20 of them, so this is ten requests.
const ELDER: f32 = 200.0;
/// The prior: one chunk in ten comes back in each bucket. Only its being equal in all matters.
const PRIOR: f32 = 0.1;

/// Ages to buckets, for one capacity.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ages {
    /// Half octaves below the first bucket's end.
    first: u32,
}

impl Ages {
    pub(super) fn new(capacity: usize) -> Self {
        let octave = capacity.max(1).ilog2();
        Self { first: 2 * octave.saturating_sub(OCTAVES_BELOW) }
    }

    /// The bucket of an age.
    pub(super) fn bucket(self, age: u32) -> usize {
        let age = u64::from(age) + 2;
        let octave = age.ilog2();
        let half = 2 * octave + (age >> (octave - 1) & 1) as u32;
        (half.saturating_sub(self.first + 2) as usize).min(AGES - 1)
    }

    /// How long a chunk stays in a bucket. The last one is open: it counts as one octave.
    fn width(self, bucket: usize) -> f32 {
        let start = |bucket: usize| {
            let half = self.first + 2 + bucket as u32;
            (if half.is_multiple_of(2) { 2.0 } else { 3.0_f32 }) * 2.0_f32.powi(half as i32 / 2 - 1)
        };
        match bucket {
            0 => start(1),
            last if last == AGES - 1 => start(last),
            bucket => start(bucket + 1) - start(bucket),
        }
    }
}

/// One figure per age bucket.
pub(super) type Curve = [f32; AGES];

/// Lives of a class by the bucket they ended in, or are in.
#[derive(Debug, Clone, Copy, Default)]
struct Lives {
    hits: Curve,
    /// Ended without a hit.
    lost: Curve,
    /// Going on, as the last full census found them.
    going: Curve,
}

/// The sums behind the estimate, per class.
#[derive(Debug)]
pub(super) struct Hazards {
    ages: Ages,
    lives: Vec<Lives>,
    census: Vec<Curve>,
    /// Accesses after which an ended life counts half.
    half_life: f32,
}

/// Hits and exposure, to be added up over classes.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    hits: Curve,
    exposure: Curve,
}

impl Counts {
    fn add(&mut self, other: &Self, weight: f32) {
        for age in 0..AGES {
            self.hits[age] += weight * other.hits[age];
            self.exposure[age] += weight * other.exposure[age];
        }
    }

    /// The chance of a hit in each bucket for who enters it, with the elder's as the default.
    fn hazard(&self, elder: &Curve) -> Curve {
        std::array::from_fn(|age| {
            (self.hits[age] + ELDER * elder[age]) / (self.exposure[age] + ELDER)
        })
    }
}

impl Hazards {
    pub(super) fn new(ages: Ages, half_life: f32) -> Self {
        Self {
            ages,
            lives: vec![Lives::default(); CLASSES],
            census: vec![Curve::default(); CLASSES],
            half_life,
        }
    }

    /// A life ended with a hit.
    pub(super) fn hit(&mut self, class: Class, bucket: usize) {
        self.lives[class.index()].hits[bucket] += 1.0;
    }

    /// A life was given up.
    pub(super) fn lost(&mut self, class: Class, bucket: usize) {
        self.lives[class.index()].lost[bucket] += 1.0;
    }

    /// A life goes on.
    pub(super) fn going(&mut self, class: Class, bucket: usize) {
        self.census[class.index()][bucket] += 1.0;
    }

    /// The census is complete, `accesses` after the last one.
    pub(super) fn close_census(&mut self, accesses: u32) {
        let keep = (-(accesses as f32) / self.half_life).exp2();
        for (lives, census) in self.lives.iter_mut().zip(&mut self.census) {
            lives.going = std::mem::take(census);
            lives.hits.iter_mut().chain(&mut lives.lost).for_each(|count| *count *= keep);
        }
    }

    fn counts(&self, class: Class) -> Counts {
        let lives = &self.lives[class.index()];
        let mut counts = Counts { hits: lives.hits, exposure: Curve::default() };
        let mut later = 0.0;
        for age in (0..AGES).rev() {
            let unfinished = lives.lost[age] + lives.going[age];
            counts.exposure[age] = later + lives.hits[age] + unfinished / 2.0;
            later += lives.hits[age] + unfinished;
        }
        counts
    }

    /// The hazard of every class, smoothed.
    fn curves(&self) -> Vec<Curve> {
        let mut all = Counts::default();
        let mut by_history = [Counts::default(); Class::HISTORIES];
        let mut by_uses = [Counts::default(); Class::USES];
        for class in Class::all() {
            let counts = self.counts(class);
            all.add(&counts, 1.0);
            by_uses[class.uses_index()].add(&counts, 1.0);
            by_history[class.history()].add(&counts, 1.0);
        }
        let all = all.hazard(&[PRIOR; AGES]);
        let by_uses = by_uses.map(|counts| counts.hazard(&all));
        Class::all()
            .map(|class| {
                let mut history = by_history[class.history()];
                for neighbour in class.neighbours() {
                    history.add(&by_history[neighbour.history()], 0.5);
                }
                let history = history.hazard(&by_uses[class.uses_index()]);
                self.counts(class).hazard(&history)
            })
            .collect()
    }

    /// The rank of every class (major) and bucket (minor).
    pub(super) fn ranks(&self, ranks: &mut Vec<f32>) {
        ranks.clear();
        ranks.extend(self.curves().iter().flat_map(|hazard| gittins(self.ages, hazard)));
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.lives.capacity() * size_of::<Lives>() + self.census.capacity() * size_of::<Curve>()
    }
}

/// The Gittins index at the middle of every bucket.
fn gittins(ages: Ages, hazard: &Curve) -> Curve {
    std::array::from_fn(|from| {
        let (mut alive, mut hit, mut time, mut best) = (1.0_f32, 0.0, 0.0, 0.0_f32);
        for bucket in from..AGES {
            let part = if bucket == from { 0.5 } else { 1.0 };
            let hazard = part * hazard[bucket];
            hit += alive * hazard;
            // Who is hit in a bucket was in it for half of it.
            time += alive * part * ages.width(bucket) * (1.0 - hazard / 2.0);
            alive *= 1.0 - hazard;
            best = best.max(hit / time);
        }
        best
    })
}
