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
//! A class with few lives believes its elders: its history at all depths (neighbours in gap
//! counting half) scaled by what its depth has of hits in all; then its number of uses alone;
//! then all chunks; then the prior, which says that reuse is as likely in each octave of age.
//! That is LRU's belief, so an index that has seen nothing behaves as LRU.
//!
//! # Rank
//! The Gittins index of a class at an age: over all horizons, the greatest ratio of the chance
//! of a hit within the horizon to the time the slot is occupied until the hit or the horizon.
//! J. Gittins, "Bandit processes and dynamic allocation indices", 1979; for caches, it is the
//! best order there is when reuse times of chunks are independent.

use super::class::{CLASSES, Class};

/// Age buckets: two an octave over twelve octaves, from a 128th of the capacity to 32 times. A
/// younger chunk has just been used; an older one is past what ghosts remember.
pub(super) const AGES: usize = 24;
/// Octaves of age below the capacity that are told apart.
const OCTAVES_BELOW: u32 = 7;
/// Lives that a class needs to be believed as much as its elder. Chunks of one request live and
/// die together, about 20 of them, so this is ten requests.
const ELDER: f32 = 200.0;
/// Lives that a class at one depth needs for that: five times as many, for there are five depths.
const ELDER_DEPTH: f32 = 5.0 * ELDER;
/// Hits that a depth needs for half of its own factor: those of one request.
const FACTOR: f32 = 20.0;
/// Of a hazard, so that somebody always lives on.
const HAZARD_MAX: f32 = 0.95;
/// The prior: about one chunk in ten comes back in each octave. It only matters that it is the
/// same in all.
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

    /// The age at which a bucket begins.
    fn start(self, bucket: usize) -> u32 {
        let half = self.first + 2 + bucket as u32;
        let mantissa = if half.is_multiple_of(2) { 2 } else { 3 };
        if bucket == 0 { 0 } else { (mantissa << (half / 2 - 1)) - 2 }
    }

    /// How long a chunk stays in a bucket. The last one is open: it counts as one octave.
    pub(super) fn width(self, bucket: usize) -> u32 {
        let start = self.start(bucket);
        if bucket == AGES - 1 { start } else { self.start(bucket + 1) - start }
    }

    /// The hazards of reuse at a rate of one over the age.
    fn prior(self) -> Curve {
        std::array::from_fn(|bucket| {
            let (start, width) = (self.start(bucket) as f32, self.width(bucket) as f32);
            PRIOR * width / (start + width / 2.0)
        })
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

    /// The chance of a hit in each bucket for who enters it, the elder's weighing as much as
    /// `weight` lives.
    fn hazard(&self, elder: &Curve, weight: f32) -> Curve {
        std::array::from_fn(|age| {
            (self.hits[age] + weight * elder[age]) / (self.exposure[age] + weight)
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
        let counts: Vec<Counts> = Class::all().map(|class| self.counts(class)).collect();
        let mut all = Counts::default();
        let mut by_uses = [Counts::default(); Class::USES];
        let mut by_history = [Counts::default(); Class::HISTORIES];
        for (class, counts) in Class::all().zip(&counts) {
            all.add(counts, 1.0);
            by_uses[class.uses()].add(counts, 1.0);
            by_history[class.history_index()].add(counts, 1.0);
        }
        let all = all.hazard(&self.ages.prior(), ELDER);
        let by_uses = by_uses.map(|counts| counts.hazard(&all, ELDER));
        let mut curves: Vec<Curve> = Class::all()
            .map(|class| {
                let mut history = by_history[class.history_index()];
                for neighbour in class.neighbours() {
                    history.add(&by_history[neighbour], 0.5);
                }
                history.hazard(&by_uses[class.uses()], ELDER)
            })
            .collect();
        scale_by_depth(&mut curves, &counts);
        for (curve, counts) in curves.iter_mut().zip(&counts) {
            *curve = counts.hazard(curve, ELDER_DEPTH);
        }
        curves
    }

    /// Its sums, as figures: ages are relative to the capacity, so that they are of use for any.
    pub(super) fn lessons(&self) -> impl Iterator<Item = f32> {
        self.lives.iter().flat_map(|lives| {
            let lost = lives.lost.into_iter().zip(lives.going);
            lives.hits.into_iter().chain(lost.map(|(lost, going)| lost + going))
        })
    }

    /// Takes the place of what was learned so far.
    pub(super) fn learn(&mut self, lessons: &[f32]) {
        for (lives, lesson) in self.lives.iter_mut().zip(lessons.chunks_exact(2 * AGES)) {
            let (hits, lost) = lesson.split_at(AGES);
            lives.hits.copy_from_slice(hits);
            lives.lost.copy_from_slice(lost);
        }
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

/// Scales curves that know of no depth by what each depth has of hits over what they foretell.
fn scale_by_depth(curves: &mut [Curve], counts: &[Counts]) {
    let mut sums = [(FACTOR, FACTOR); Class::USES_DEPTHS];
    for (class, (curve, counts)) in Class::all().zip(curves.iter().zip(counts)) {
        let (hits, foretold) = &mut sums[class.uses_depth()];
        *hits += counts.hits.iter().sum::<f32>();
        *foretold +=
            counts.exposure.iter().zip(curve).map(|(lives, hazard)| lives * hazard).sum::<f32>();
    }
    for (class, curve) in Class::all().zip(curves) {
        let (hits, foretold) = sums[class.uses_depth()];
        for hazard in curve {
            *hazard = (*hazard * hits / foretold).min(HAZARD_MAX);
        }
    }
}

/// The Gittins index at the middle of every bucket.
pub(super) fn gittins(ages: Ages, hazard: &Curve) -> Curve {
    let widths: Curve = std::array::from_fn(|bucket| ages.width(bucket) as f32);
    std::array::from_fn(|from| {
        let (mut alive, mut hit, mut time) = (1.0_f32, 0.0_f32, 0.0_f32);
        let mut best = (0.0_f32, 1.0_f32);
        for bucket in from..AGES {
            let part = if bucket == from { 0.5 } else { 1.0 };
            let hazard = part * hazard[bucket];
            hit += alive * hazard;
            // Who is hit in a bucket was in it for half of it.
            time += alive * part * widths[bucket] * (1.0 - hazard / 2.0);
            alive *= 1.0 - hazard;
            // Ratios are compared without the division.
            if hit * best.1 > best.0 * time {
                best = (hit, time);
            }
        }
        best.0 / best.1
    })
}
