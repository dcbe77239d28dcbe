//! Work on numbered pieces by several threads, whose results are taken in order by the caller.

use std::sync::mpsc::{sync_channel, Receiver};

use crate::failure::{Failure, Outcome};

/// Threads that work beside the caller.
pub const THREADS: usize = 2;
/// Fewer pieces than this are not worth threads.
const WORTH_THREADS: usize = 8;
/// Results of one thread that may wait for the caller: what bounds the memory.
const QUEUE: usize = 4;

/// Do `work` for every number below `count`, and give each result to `consume` in the order of the numbers. The first
/// failure in that order ends all and is returned.
///
/// `state` makes what each thread keeps between its pieces (buffers).
pub fn in_order<S, T: Send>(
    count: usize,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Outcome<T> + Sync,
    mut consume: impl FnMut(T) -> Outcome<()>,
) -> Outcome<()> {
    if count < WORTH_THREADS {
        let mut kept = state();
        return (0..count).try_for_each(|number| consume(work(&mut kept, number)?));
    }
    std::thread::scope(|scope| {
        let results: Vec<Receiver<Outcome<T>>> = (0..THREADS)
            .map(|thread| {
                let (sender, receiver) = sync_channel(QUEUE);
                let (state, work) = (&state, &work);
                scope.spawn(move || {
                    let mut kept = state();
                    for number in (thread..count).step_by(THREADS) {
                        let result = work(&mut kept, number);
                        let last = result.is_err();
                        // Nobody listens any more after a failure.
                        if sender.send(result).is_err() || last {
                            return;
                        }
                    }
                });
                receiver
            })
            .collect();
        (0..count).try_for_each(|number| match results[number % THREADS].recv() {
            Ok(result) => consume(result?),
            Err(_) => Err(Failure::Layer {
                kind: "io",
                message: "a thread of the pipeline has failed".to_owned(),
            }),
        })
    })
}
