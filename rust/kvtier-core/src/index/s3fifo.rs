//! S3-FIFO: newcomers prove themselves in a small queue.
//!
//! J. Yang, Y. Zhang, Z. Qiu, Y. Yue and K. V. Rashmi, "FIFO queues are all you need for cache
//! eviction", SOSP 2023. Newcomers enter the *small* queue, a tenth of the capacity; those with a
//! ghost enter the *main* queue. At the end of the small queue a token that was used more than
//! once since it entered moves to the main queue, another one is evicted and leaves a ghost. At
//! the end of the main queue a token that was used goes round again, one use less to its credit;
//! another one is evicted. Uses are counted up to 3; a ghost queue as long as the main queue.
//!
//! # Here
//! A token that is being written or is pinned counts towards its queue's size, but is in no
//! queue, and enters at the front when it is evictable (again). A repeated use by one request is
//! no use: queues know no recency. A protected token at the end of a queue is passed over and
//! stays there. Of the newcomers of a call the last is not counted yet while room is made for
//! it, as in the paper.
//!
//! # Invariants
//! - Sizes are the numbers of tokens that belong to each queue; uses are 0 to 3.
//! - There are at most as many ghosts as the main queue is meant to hold.
//!
//! Every operation is O(1), victims O(victims + protected) amortised: each round through the main
//! queue takes a use away. Memory a token: 8 (links) + 2 (queue and uses), and 22 to 27 a ghost,
//! of which there are at most nine for ten tokens.

use super::Token;
use super::ghosts::Ghosts;
use super::list::{Links, List};
use super::policy::{Policy, Removal, grow_to};

/// Most uses that are counted.
const MAX_USES: u8 = 3;
/// A token with more uses than this leaves the small queue for the main one.
const PROMOTED_ABOVE: u8 = 1;

/// Which queue a token belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    None,
    Small,
    Main,
    /// None any more: a victim out of the small queue, which leaves a ghost.
    Leaving,
}

#[derive(Debug, Clone, Copy)]
struct Note {
    queue: Queue,
    uses: u8,
}

/// The queues, newest in front.
#[derive(Debug)]
pub(super) struct S3Fifo {
    small_target: usize,
    main_target: usize,
    links: Links,
    notes: Vec<Note>,
    small: List,
    main: List,
    /// Tokens that belong to each queue, pinned ones and those being written too.
    small_size: usize,
    main_size: usize,
    ghosts: Ghosts<()>,
    ghost_queue: List,
    /// Where the last newcomer will go.
    last: Queue,
}

impl S3Fifo {
    pub(super) fn new(capacity: usize) -> Self {
        let small_target = (capacity / 10).max(1);
        Self {
            small_target,
            main_target: capacity - small_target,
            links: Links::default(),
            notes: Vec::new(),
            small: List::default(),
            main: List::default(),
            small_size: 0,
            main_size: 0,
            ghosts: Ghosts::new(capacity - small_target),
            ghost_queue: List::default(),
            last: Queue::None,
        }
    }

    /// Puts an unlinked token in front of its queue.
    fn link(&mut self, token: Token) {
        match self.notes[token as usize].queue {
            Queue::None | Queue::Leaving => {}
            Queue::Small => self.small.push_front(&mut self.links, token),
            Queue::Main => self.main.push_front(&mut self.links, token),
        }
    }

    /// Takes a token out of its queue's list; it still belongs to the queue.
    fn unlink(&mut self, token: Token) {
        match self.notes[token as usize].queue {
            Queue::None | Queue::Leaving => {}
            Queue::Small => self.small.remove(&mut self.links, token),
            Queue::Main => self.main.remove(&mut self.links, token),
        }
    }

    /// Lets a token belong to a queue, or to none; without uses.
    fn belong(&mut self, token: Token, queue: Queue) {
        let note = &mut self.notes[token as usize];
        let before = std::mem::replace(note, Note { queue, uses: 0 }).queue;
        self.small_size += usize::from(queue == Queue::Small);
        self.main_size += usize::from(queue == Queue::Main);
        self.small_size -= usize::from(before == Queue::Small);
        self.main_size -= usize::from(before == Queue::Main);
    }

    /// Takes a victim out of the small queue, moving on those that were used; none if no token
    /// is left, or if the main queue overflows by what moved.
    fn pop_small(&mut self, spare: &mut Spare<'_>) -> Option<Token> {
        while let Some(token) = self.small.back() {
            self.unlink(token);
            if spare.spares(&mut self.links, token, Queue::Small) {
                continue;
            }
            if self.notes[token as usize].uses <= PROMOTED_ABOVE {
                self.belong(token, Queue::Leaving);
                return Some(token);
            }
            self.belong(token, Queue::Main);
            self.link(token);
            if self.main_size > self.main_target + usize::from(self.last == Queue::Main) {
                return None;
            }
        }
        None
    }

    /// Takes a victim out of the main queue; none if no token is left.
    fn pop_main(&mut self, spare: &mut Spare<'_>) -> Option<Token> {
        while let Some(token) = self.main.back() {
            self.unlink(token);
            if spare.spares(&mut self.links, token, Queue::Main) {
                continue;
            }
            let uses = &mut self.notes[token as usize].uses;
            if *uses == 0 {
                self.belong(token, Queue::None);
                return Some(token);
            }
            *uses -= 1;
            self.link(token);
        }
        None
    }
}

/// Protected tokens, put aside while victims are chosen.
struct Spare<'a> {
    protected: &'a dyn Fn(Token) -> bool,
    small: List,
    main: List,
}

impl Spare<'_> {
    /// Puts an unlinked token aside if it is protected.
    fn spares(&mut self, links: &mut Links, token: Token, queue: Queue) -> bool {
        let spared = (self.protected)(token);
        if spared {
            let aside = if queue == Queue::Small { &mut self.small } else { &mut self.main };
            aside.push_front(links, token);
        }
        spared
    }
}

/// Puts tokens that were put aside back to the end they were taken from, in their order.
fn put_back(links: &mut Links, mut aside: List, queue: &mut List) {
    while let Some(token) = aside.front() {
        aside.remove(links, token);
        queue.push_back(links, token);
    }
}

impl Policy for S3Fifo {
    fn grow(&mut self, tokens: usize) {
        self.links.grow(tokens);
        let none = Note { queue: Queue::None, uses: 0 };
        grow_to(&mut self.notes, tokens, none);
    }

    fn admit(&mut self, token: Token, fingerprint: u64, _parent: Token) {
        self.last = match self.ghosts.find(fingerprint) {
            Some(ghost) => {
                self.ghosts.remove(&mut self.ghost_queue, ghost);
                Queue::Main
            }
            None => Queue::Small,
        };
        self.belong(token, self.last);
    }

    fn cancel(&mut self, token: Token) {
        self.last = Queue::None;
        self.belong(token, Queue::None);
    }

    fn insert(&mut self, token: Token) {
        self.link(token);
    }

    fn touch(&mut self, token: Token, repeat: bool) {
        let uses = &mut self.notes[token as usize].uses;
        *uses = (*uses + u8::from(!repeat)).min(MAX_USES);
    }

    fn acquire(&mut self, token: Token) {
        self.unlink(token);
    }

    fn release(&mut self, token: Token) {
        self.link(token);
    }

    fn remove(&mut self, token: Token, fingerprint: u64, removal: Removal) {
        // A victim left its queue when it was chosen.
        if self.links.is_linked(token) {
            self.unlink(token);
        }
        let newcomer = matches!(self.notes[token as usize].queue, Queue::Small | Queue::Leaving);
        if newcomer && removal == Removal::Evicted {
            self.ghosts.push(&mut self.ghost_queue, fingerprint, ());
            self.ghosts.truncate(&mut self.ghost_queue, self.main_target);
        }
        self.belong(token, Queue::None);
    }

    fn victims(
        &mut self,
        count: usize,
        protected: &dyn Fn(Token) -> bool,
        victims: &mut Vec<Token>,
    ) {
        let mut spare = Spare { protected, small: List::default(), main: List::default() };
        for _ in 0..count {
            let small = self.small_size.saturating_sub(usize::from(self.last == Queue::Small));
            let first = if small >= self.small_target || self.main.is_empty() {
                self.pop_small(&mut spare)
            } else {
                None
            };
            let victim =
                first.or_else(|| self.pop_main(&mut spare)).or_else(|| self.pop_small(&mut spare));
            victims.extend(victim);
        }
        put_back(&mut self.links, spare.small, &mut self.small);
        put_back(&mut self.links, spare.main, &mut self.main);
    }

    fn evictable(&self) -> usize {
        self.small.len() + self.main.len()
    }

    fn holds(&self, token: Token) -> bool {
        self.links.is_linked(token)
    }

    fn heap_bytes(&self) -> usize {
        self.links.heap_bytes()
            + self.notes.capacity() * size_of::<Note>()
            + self.ghosts.heap_bytes()
    }

    fn validate(&self) -> Result<(), String> {
        for (list, size, queue) in [
            (&self.small, self.small_size, Queue::Small),
            (&self.main, self.main_size, Queue::Main),
        ] {
            list.validate(&self.links)?;
            let stray = |&token: &Token| self.notes[token as usize].queue != queue;
            if let Some(token) = list.iter_back(&self.links).find(stray) {
                return Err(format!("token {token} is in {queue:?}, where it does not belong"));
            }
            let counted = self.notes.iter().filter(|note| note.queue == queue).count();
            if counted != size {
                return Err(format!("{counted} tokens belong to {queue:?}, kept {size}"));
            }
        }
        let wrong = |note: &Note| note.uses > MAX_USES || note.queue == Queue::Leaving;
        if let Some(token) = self.notes.iter().position(wrong) {
            return Err(format!("token {token} is noted as {:?}", self.notes[token]));
        }
        self.ghosts.validate(&[(&self.ghost_queue, &|()| true)])?;
        if self.ghost_queue.len() > self.main_target {
            return Err(format!("{} ghosts are too many", self.ghost_queue.len()));
        }
        Ok(())
    }
}
