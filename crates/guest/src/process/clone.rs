//! The `clone3` system call with a stack of the caller's, which no library offers. Knows nothing of commands.

use std::{
    ffi::c_void,
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    ptr,
};

/// Enough for a handful of system calls.
const STACK_SIZE: usize = 64 << 10;
/// Start in the cgroup whose directory is open; beyond the 32 bits of the older calls' flags.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// What the child runs. It must never return and must not unwind.
pub type Entry = unsafe extern "C" fn(*mut c_void) -> !;

/// `struct clone_args` of the kernel, up to the version that has `cgroup` (Linux 5.7).
#[repr(C)]
#[derive(Default)]
pub struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

impl CloneArgs {
    /// A child on our memory and on `stack`, for which the caller waits until it executes a program or ends. The kernel
    /// stores its pidfd (close-on-exec) in `pidfd`.
    pub fn vfork(stack: &Stack, pidfd: &mut RawFd, cgroup: Option<BorrowedFd<'_>>) -> Self {
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD;
        Self {
            flags: flags as u64 | cgroup.map_or(0, |_| CLONE_INTO_CGROUP),
            pidfd: ptr::from_mut(pidfd) as u64,
            exit_signal: libc::SIGCHLD as u64,
            stack: stack.bottom as u64,
            stack_size: STACK_SIZE as u64,
            cgroup: cgroup.map_or(0, |cgroup| cgroup.as_raw_fd() as u64),
            ..Self::default()
        }
    }
}

/// Makes the child; it runs `entry(data)`. Returns its process number in the parent.
///
/// # Safety
/// `entry` must confine itself to what is allowed in a child that shares our memory: system calls on prepared data.
/// The stack in `args` and `data` must live until the call returns.
pub unsafe fn clone3(args: &CloneArgs, entry: Entry, data: *mut c_void) -> io::Result<u32> {
    let result: i64;
    // SAFETY: the kernel keeps every register but rax, rcx and r11. The child goes on with the top of its own stack
    // in rsp, aligned as the calling convention wants, and leaves through `entry`, so it never touches our frame.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") ptr::from_ref(args),
            in("rsi") size_of::<CloneArgs>(),
            in("r12") entry,
            in("r13") data,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    // SAFETY: the same, with x0 for the result and x8 for the number.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!(
            "svc 0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x0, x20",
            "blr x21",
            "brk 1",
            "2:",
            inlateout("x0") ptr::from_ref(args) as i64 => result,
            in("x1") size_of::<CloneArgs>(),
            in("x8") libc::SYS_clone3,
            in("x20") data,
            in("x21") entry,
        );
    }
    if result < 0 {
        Err(io::Error::from_raw_os_error(-result as i32))
    } else {
        Ok(result as u32)
    }
}

/// A stack for a child, with a page below it that may not be touched.
pub struct Stack {
    mapping: *mut c_void,
    len: usize,
    bottom: *mut u8,
}

impl Stack {
    pub fn new() -> io::Result<Self> {
        // SAFETY: a new private mapping, of which the lowest page is then closed.
        unsafe {
            let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
            let len = STACK_SIZE + page;
            let mapping = libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK,
                -1,
                0,
            );
            if mapping == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            let stack = Self {
                mapping,
                len,
                bottom: mapping.cast::<u8>().add(page),
            };
            if libc::mprotect(mapping, page, libc::PROT_NONE) == -1 {
                return Err(io::Error::last_os_error());
            }
            Ok(stack)
        }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody runs on it any more.
        unsafe {
            libc::munmap(self.mapping, self.len);
        }
    }
}
