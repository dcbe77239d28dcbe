//! All processes that clients can name: the running ones, and for a while the ends of those that are over.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::running::Process;
use crate::{
    proto::process::{
        process_event::EndEvent, process_selector::Selector, ProcessInfo, ProcessSelector,
    },
    rpc::{Code, RpcError, RpcResult},
};

/// How long the end of a process is kept for clients that come back.
const RETENTION: Duration = Duration::from_secs(30);

/// What a selector leads to.
pub enum Found {
    Running(Arc<Process>),
    Ended { pid: u32, end: EndEvent },
}

/// The registry. Numbers and tags are reused, so entries have keys of their own.
#[derive(Default)]
pub struct Table(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    next: u64,
    entries: HashMap<u64, Entry>,
    by_pid: HashMap<u32, u64>,
    by_tag: HashMap<String, u64>,
    /// Ended entries, oldest first, with the time at which they are forgotten.
    expiry: VecDeque<(Instant, u64)>,
}

struct Entry {
    pid: u32,
    tag: Option<String>,
    state: State,
}

enum State {
    Running(Arc<Process>),
    Ended(EndEvent),
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        inner.forget_expired(Instant::now());
        inner
    }

    /// Adds a running process and returns its key. A number or tag that another entry has leads to this one now.
    pub fn insert(&self, process: Arc<Process>) -> u64 {
        let mut inner = self.lock();
        let key = inner.next;
        inner.next += 1;
        let entry = Entry {
            pid: process.info.pid,
            tag: process.info.tag.clone(),
            state: State::Running(process),
        };
        inner.by_pid.insert(entry.pid, key);
        if let Some(tag) = &entry.tag {
            inner.by_tag.insert(tag.clone(), key);
        }
        inner.entries.insert(key, entry);
        key
    }

    /// Puts the end in the place of the process.
    pub fn finish(&self, key: u64, end: EndEvent) {
        let mut inner = self.lock();
        if let Some(entry) = inner.entries.get_mut(&key) {
            entry.state = State::Ended(end);
            inner.expiry.push_back((Instant::now() + RETENTION, key));
        }
    }

    /// The processes that are alive, in the order of their start.
    pub fn list(&self) -> Vec<ProcessInfo> {
        let inner = self.lock();
        let mut alive: Vec<_> = inner
            .entries
            .iter()
            .filter_map(|(key, entry)| match &entry.state {
                State::Running(process) if !process.is_over() => Some((*key, process.info.clone())),
                _ => None,
            })
            .collect();
        alive.sort_by_key(|(key, _)| *key);
        alive.into_iter().map(|(_, info)| info).collect()
    }

    /// What `selector` names. Fails with `not_found`, or `unimplemented` for an empty selector.
    pub fn find(&self, selector: Option<ProcessSelector>) -> RpcResult<Found> {
        let selector = selector
            .and_then(|selector| selector.selector)
            .ok_or_else(|| {
                RpcError::new(
                    Code::Unimplemented,
                    "the selector names neither pid nor tag",
                )
            })?;
        let inner = self.lock();
        let (key, name) = match &selector {
            Selector::Pid(pid) => (inner.by_pid.get(pid), format!("pid {pid}")),
            Selector::Tag(tag) => (inner.by_tag.get(tag), format!("tag '{tag}'")),
        };
        let entry = key.and_then(|key| inner.entries.get(key)).ok_or_else(|| {
            RpcError::new(Code::NotFound, format!("there is no process with {name}"))
        })?;
        Ok(match &entry.state {
            State::Running(process) => Found::Running(Arc::clone(process)),
            State::Ended(end) => Found::Ended {
                pid: entry.pid,
                end: end.clone(),
            },
        })
    }

    /// The same for calls that need a running process: an end counts as `not_found`.
    pub fn find_running(&self, selector: Option<ProcessSelector>) -> RpcResult<Arc<Process>> {
        match self.find(selector)? {
            Found::Running(process) => Ok(process),
            Found::Ended { pid, .. } => Err(RpcError::new(
                Code::NotFound,
                format!("the process with pid {pid} is over"),
            )),
        }
    }
}

impl Inner {
    fn forget_expired(&mut self, now: Instant) {
        while let Some(&(when, key)) = self.expiry.front() {
            if when > now {
                return;
            }
            self.expiry.pop_front();
            let Some(entry) = self.entries.remove(&key) else {
                continue;
            };
            // The number or the tag may lead to a younger entry by now.
            if self.by_pid.get(&entry.pid) == Some(&key) {
                self.by_pid.remove(&entry.pid);
            }
            if let Some(tag) = entry.tag.filter(|tag| self.by_tag.get(tag) == Some(&key)) {
                self.by_tag.remove(&tag);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::exit::Exit;

    fn ended(inner: &mut Inner, pid: u32, tag: &str, when: Instant) -> u64 {
        let key = inner.next;
        inner.next += 1;
        inner.by_pid.insert(pid, key);
        inner.by_tag.insert(tag.to_owned(), key);
        inner.entries.insert(
            key,
            Entry {
                pid,
                tag: Some(tag.to_owned()),
                state: State::Ended(Exit::Code(0).event()),
            },
        );
        inner.expiry.push_back((when, key));
        key
    }

    #[test]
    fn ends_are_forgotten_but_reused_names_stay() {
        let now = Instant::now();
        let mut inner = Inner::default();
        ended(&mut inner, 7, "a", now);
        let young = ended(&mut inner, 7, "b", now + RETENTION);
        inner.forget_expired(now);
        assert_eq!(inner.by_pid.get(&7), Some(&young));
        assert_eq!(inner.by_tag.get("a"), None);
        assert_eq!(inner.by_tag.get("b"), Some(&young));
        inner.forget_expired(now + RETENTION);
        assert!(inner.entries.is_empty() && inner.by_pid.is_empty() && inner.by_tag.is_empty());
    }

    #[test]
    fn an_empty_selector_is_unimplemented_and_a_wrong_one_not_found() {
        let table = Table::default();
        let code = |selector| table.find(selector).err().map(|error| error.code);
        assert_eq!(code(None), Some(Code::Unimplemented));
        assert_eq!(
            code(Some(ProcessSelector::default())),
            Some(Code::Unimplemented)
        );
        let selector = ProcessSelector {
            selector: Some(Selector::Tag("x".into())),
        };
        assert_eq!(code(Some(selector)), Some(Code::NotFound));
    }
}
