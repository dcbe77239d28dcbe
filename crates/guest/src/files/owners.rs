//! Names of users and groups by number, each looked up once per request: a listing has many entries and few owners.

use std::{cell::RefCell, collections::HashMap};

use crate::agent::users;

/// The names seen so far. Make a new one for each request: commands in the sandbox add users while we run.
#[derive(Debug, Default)]
pub struct Owners {
    users: RefCell<HashMap<u32, String>>,
    groups: RefCell<HashMap<u32, String>>,
}

impl Owners {
    /// The user's name, or the number as text.
    pub fn user(&self, uid: u32) -> String {
        remembered(&self.users, uid, users::user_name)
    }

    /// The group's name, or the number as text.
    pub fn group(&self, gid: u32) -> String {
        remembered(&self.groups, gid, users::group_name)
    }
}

fn remembered(
    names: &RefCell<HashMap<u32, String>>,
    id: u32,
    look_up: fn(u32) -> String,
) -> String {
    names
        .borrow_mut()
        .entry(id)
        .or_insert_with(|| look_up(id))
        .clone()
}
