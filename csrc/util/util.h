/* SPDX-License-Identifier: Apache-2.0 */
/* Small things every part uses. Nothing here allocates after start unless it says so. */
#ifndef ISWI_UTIL_H
#define ISWI_UTIL_H

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "isw.h"

#define ISWI_ARRAY_LEN(a)                 (sizeof(a) / sizeof((a)[0]))
#define ISWI_CONTAINER(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))
#define ISWI_MIN(a, b)                    ((a) < (b) ? (a) : (b))
#define ISWI_MAX(a, b)                    ((a) > (b) ? (a) : (b))

/* Every thread of ours has this much stack: all of it is locked, so it is small. */
#define ISWI_STACK_BYTES (128u * 1024u)

/*
 * Fills error (may be NULL) and returns code (negative errno), so that a failing function can
 * `return iswi_error(error, -EINVAL, "...")`. The text is a sentence for the user.
 */
int iswi_error(struct isw_error *error, int code, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* CLOCK_MONOTONIC in nanoseconds. */
uint64_t iswi_now_ns(void);

/*
 * The clock behind everything that has a deadline. now_ns: required, any thread, does not block.
 */
struct iswi_clock {
	uint64_t (*now_ns)(void *ctx);
	void *ctx;
};
extern const struct iswi_clock iswi_clock_monotonic;

/*
 * Starts a thread with a small stack, every signal blocked, named (at most 15 characters), and
 * marked PR_SET_IO_FLUSHER where the kernel allows it (a page-path thread must not wait for
 * reclaim that waits for it).
 */
int iswi_thread_start(pthread_t *thread_out, const char *name, void *(*run)(void *), void *arg);
/*
 * Makes the calling thread a real-time one of the lowest priority where that is allowed
 * (CAP_SYS_NICE, RLIMIT_RTPRIO). The kernel lets such threads have half of the memory that it keeps
 * back from all others (mm/page_alloc.c: ALLOC_MIN_RESERVE): for those by which memory is freed
 * when there is no other left.
 */
void iswi_thread_urgent(void);

/* CRC-32C (Castagnoli). Hardware where there is some. */
uint32_t iswi_crc32c(const void *data, size_t bytes);
/* The same without the CPU's help: what iswi_crc32c falls back to, and is tested against. */
uint32_t iswi_crc32c_table(const void *data, size_t bytes);
/* The checksum of each of `pages` consecutive pages. */
void iswi_crc32c_pages(const void *data, uint32_t pages, uint32_t *crc_out);

/* Whole buffer or nothing: 0, or -errno, or -ENODATA at the end of the stream. */
int iswi_read_full(int fd, void *data, size_t bytes);
/*
 * A connection that carries pages: what is small leaves at once, and the sender is not paced by an
 * estimate of the path. BBR makes one, which suits streams: a block of far memory takes 1.1 times
 * as long with it over loopback (docs/benchmarks.md, What was tried). Before it is connected, or
 * listens: what BBR has begun with stays paced. Best effort; on a Unix socket it does nothing.
 */
void iswi_page_socket_tune(int fd);
/* Tries to get a lock that a killed process may still hold; 0, or -EWOULDBLOCK, or -errno. */
int iswi_flock_wait(int fd, uint32_t wait_ms_max);

/* A function of a library, and where its address goes: a pointer to such functions. */
struct iswi_function {
	const char *name;
	void *address_out;
};
/*
 * Loads a library for good and looks its functions up. -ENOENT: this host lacks the library, or
 * that lacks a function; the error says so, and names Debian's packages. May block.
 */
int iswi_load_functions(const char *library, const char *packages,
			const struct iswi_function *functions, size_t count,
			struct isw_error *error);

/* ---- events to Python: bounded ring + eventfd */
#define ISWI_EVENT_RING 1024
struct iswi_events {
	pthread_mutex_t lock;
	struct isw_event ring[ISWI_EVENT_RING];
	uint32_t head, used;
	bool overflow;
	int fd;
	atomic_uint_fast64_t dropped; /* relaxed: a statistic */
};
int iswi_events_init(struct iswi_events *events);
void iswi_events_fini(struct iswi_events *events);
/* Any thread, no other lock needed; never blocks. */
void iswi_events_put(struct iswi_events *events, const struct isw_event *event);
int iswi_events_take(struct iswi_events *events, struct isw_event *events_out, uint32_t max);

/* ---- latency histogram: 8 buckets per power of two from 256 ns up */
struct iswi_latency {
	atomic_uint_fast64_t bucket[ISW_LATENCY_BUCKETS]; /* relaxed: statistics */
};
void iswi_latency_add(struct iswi_latency *latency, uint64_t ns);

/* Relaxed counter increment: statistics only, they order nothing. */
static inline void iswi_count(atomic_uint_fast64_t *counter, uint64_t by)
{
	atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}
static inline uint64_t iswi_counted(const atomic_uint_fast64_t *counter)
{
	return atomic_load_explicit(counter, memory_order_relaxed);
}

#endif
