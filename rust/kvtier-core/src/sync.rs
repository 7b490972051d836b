//! Locks, atomics and threads, in one place, so that a test can choose who runs when.
//!
//! Built with `--cfg kvtier_shuttle` (`make interleavings`), every lock, atomic and thread is
//! shuttle's: a scheduler with a seed decides at each of them which thread goes on. Otherwise
//! these are `parking_lot` and the standard library, and this module is gone.

#[cfg(not(kvtier_shuttle))]
pub(crate) use self::real::*;
#[cfg(kvtier_shuttle)]
pub(crate) use self::scheduled::*;

#[cfg(not(kvtier_shuttle))]
mod real {
    pub(crate) use parking_lot::{Condvar, Mutex};
    pub(crate) use std::sync::atomic;
    pub(crate) use std::thread::JoinHandle;

    /// Starts a named thread.
    pub(crate) fn spawn(
        name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name(name).spawn(run)
    }
}

#[cfg(kvtier_shuttle)]
mod scheduled {
    use std::ops::{Deref, DerefMut};
    use std::sync::PoisonError;
    use std::time::Instant;

    pub(crate) use shuttle::sync::atomic;
    pub(crate) use shuttle::thread::JoinHandle;

    /// Starts a thread; it needs no name here.
    pub(crate) fn spawn(
        _name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<JoinHandle<()>> {
        Ok(shuttle::thread::spawn(run))
    }

    /// Shuttle's mutex with the face of `parking_lot`.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok().map(|guard| MutexGuard(Some(guard)))
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// Empty only while its thread waits on a [`Condvar`].
    pub(crate) struct MutexGuard<'a, T>(Option<shuttle::sync::MutexGuard<'a, T>>);

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0.as_ref().expect("held")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().expect("held")
        }
    }

    /// Shuttle's condition variable with the face of `parking_lot`.
    #[derive(Debug, Default)]
    pub(crate) struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }

        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            let held = guard.0.take().expect("held");
            guard.0 = Some(self.0.wait(held).unwrap_or_else(PoisonError::into_inner));
        }

        /// Time stands still under the scheduler: no deadline passes.
        pub(crate) fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _end: Instant) -> Waited {
            self.wait(guard);
            Waited
        }
    }

    /// How a wait ended.
    pub(crate) struct Waited;

    impl Waited {
        pub(crate) fn timed_out(&self) -> bool {
            false
        }
    }
}
