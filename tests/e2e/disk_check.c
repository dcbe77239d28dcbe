/* Writes, discards and reads back random blocks of a disk or file, and compares every block with what it must hold.
 * As a program (-DSTANDALONE): disk_check FILE MEBIBYTES STOP-FILE goes on until STOP-FILE exists, then checks all of it.
 * Included by vmm_guest.c, which uses it on the bare disk. Every error is printed and ends it with 1. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHECK_BLOCK 4096
#define CHECK_RUN 16 /* longest write, blocks */
#ifndef BLKDISCARD
#define BLKDISCARD _IO(0x12, 119)
#endif

struct disk_check {
    int file, is_device;
    uint32_t blocks;
    uint32_t *versions; /* what each block holds; 0: zeroes */
    uint32_t next;
    uint64_t random, writes, discards, reads;
    unsigned char *buffer;
};

static uint32_t check_random(struct disk_check *check, uint32_t below) {
    check->random ^= check->random << 13;
    check->random ^= check->random >> 7;
    check->random ^= check->random << 17;
    return (uint32_t)(check->random >> 16) % below;
}

/* The content of a block: nothing but its number and version makes it. */
static void check_fill(unsigned char *buffer, uint32_t block, uint32_t version) {
    uint64_t word = ((uint64_t)block << 32 | version) * 0x9e3779b97f4a7c15u;
    if (version == 0) {
        memset(buffer, 0, CHECK_BLOCK);
        return;
    }
    for (int i = 0; i < CHECK_BLOCK / 8; i++) {
        word = word * 6364136223846793005u + 1442695040888963407u;
        memcpy(buffer + 8 * i, &word, 8);
    }
}

static int check_failed(const char *what, uint32_t block) {
    printf("disk check: %s at block %u: %s\n", what, block, strerror(errno));
    return 1;
}

static int check_read(struct disk_check *check, uint32_t first, uint32_t count) {
    static unsigned char expected[CHECK_BLOCK];
    ssize_t wanted = (ssize_t)count * CHECK_BLOCK;
    if (pread(check->file, check->buffer, wanted, (off_t)first * CHECK_BLOCK) != wanted)
        return check_failed("read", first);
    for (uint32_t i = 0; i < count; i++) {
        check_fill(expected, first + i, check->versions[first + i]);
        if (memcmp(expected, check->buffer + (size_t)i * CHECK_BLOCK, CHECK_BLOCK) != 0) {
            printf("disk check: block %u does not hold version %u\n", first + i, check->versions[first + i]);
            return 1;
        }
    }
    check->reads++;
    return 0;
}

static int check_write(struct disk_check *check, uint32_t first, uint32_t count) {
    ssize_t wanted = (ssize_t)count * CHECK_BLOCK;
    for (uint32_t i = 0; i < count; i++) {
        check->versions[first + i] = ++check->next;
        check_fill(check->buffer + (size_t)i * CHECK_BLOCK, first + i, check->next);
    }
    if (pwrite(check->file, check->buffer, wanted, (off_t)first * CHECK_BLOCK) != wanted)
        return check_failed("write", first);
    check->writes++;
    return 0;
}

static int check_discard(struct disk_check *check, uint32_t first, uint32_t count) {
    /* A discarded block of a device may hold anything by the standard; these disks promise zeroes. */
    uint64_t range[2] = {(uint64_t)first * CHECK_BLOCK, (uint64_t)count * CHECK_BLOCK};
    int failed = check->is_device ? ioctl(check->file, BLKDISCARD, range)
                                  : fallocate(check->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, range[0], range[1]);
    if (failed != 0)
        return check_failed("discard", first);
    for (uint32_t i = 0; i < count; i++)
        check->versions[first + i] = 0;
    check->discards++;
    return 0;
}

static int check_begin(struct disk_check *check, const char *path, uint32_t mebibytes) {
    struct stat status;
    memset(check, 0, sizeof(*check));
    check->random = 88172645463325252u;
    check->blocks = mebibytes * (1024 * 1024 / CHECK_BLOCK);
    check->versions = calloc(check->blocks, sizeof(uint32_t));
    check->file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0600);
    if (check->file < 0 || fstat(check->file, &status) != 0 || check->versions == NULL ||
        posix_memalign((void **)&check->buffer, CHECK_BLOCK, CHECK_RUN * CHECK_BLOCK) != 0)
        return check_failed("open", 0);
    check->is_device = S_ISBLK(status.st_mode);
    if (!check->is_device && ftruncate(check->file, (off_t)check->blocks * CHECK_BLOCK) != 0)
        return check_failed("resize", 0);
    return 0;
}

static int check_all(struct disk_check *check) {
    for (uint32_t first = 0; first < check->blocks; first += CHECK_RUN)
        if (check_read(check, first, CHECK_RUN) != 0)
            return 1;
    return 0;
}

/* One random operation. */
static int check_step(struct disk_check *check) {
    uint32_t count = 1 + check_random(check, CHECK_RUN), first = check_random(check, check->blocks - count);
    switch (check_random(check, 20)) {
    case 0:
        return check_discard(check, first, count);
    case 1:
        return fsync(check->file) == 0 ? 0 : check_failed("sync", first);
    default:
        return check_random(check, 2) ? check_write(check, first, count) : check_read(check, first, count);
    }
}

#ifdef STANDALONE
int main(int argument_count, char **arguments) {
    struct disk_check check;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argument_count != 4 || check_begin(&check, arguments[1], (uint32_t)atoi(arguments[2])) != 0)
        return 2;
    for (uint64_t step = 1; access(arguments[3], F_OK) != 0; step++) {
        if (check_step(&check) != 0)
            return 1;
        if (step % 500 == 0)
            printf("step %llu\n", (unsigned long long)step);
    }
    if (check_all(&check) != 0)
        return 1;
    printf("verified after %llu writes, %llu discards, %llu reads\n", (unsigned long long)check.writes,
           (unsigned long long)check.discards, (unsigned long long)check.reads);
    return 0;
}
#endif
