/* SPDX-License-Identifier: Apache-2.0 */
/*
 * infiniswap-holder: the parent of one device's processes. It keeps what must survive the device
 * process (descriptors, the locked state file) and decides which process follows when that dies.
 *
 * One process serves (the active one), another has been started and waits (the standby). Each has a
 * SEQPACKET socket pair with the holder. A message is one text packet; descriptors travel with it.
 * From the active process:
 *
 *   keep NAME   + a descriptor: keep it, in place of an earlier one of that name
 *   drop NAME     close it
 *   serving       it serves; its death is followed by a take-over from here on. Said again by one
 *                 that was asked to end and cannot
 *   ending        its death is the end from here on (a later `serving` takes that back)
 *   ended CODE    it is about to end, as it should
 *   renew [PATH]  start another standby; with PATH (absolute) of that program, which the standbys
 *                 after it run as well: code of another version. Answered by `renewed` or `refused
 *                 TEXT`, after which nothing has changed
 *   yield         end it at once: the standby takes over; answered only when refused
 *
 * and from a standby: `standby` (it is ready), `refused TEXT` (it can never take over), `hopeless
 * TEXT` (no process can: nothing is left to take over; the end if no process serves, else as
 * `refused`), and after `take-over` either `serving` or `hopeless TEXT` (the end). From both:
 *
 *   ring FD       the sender's descriptor FD, which no socket would carry, is an io_uring: it must
 *                 not end with the sender (isw_frontend_rings). Copied at once, closed when
 *                 all threads of the sender have ended
 *
 * To the active process, whenever it changes: `standby ready` or `standby none TEXT`; after its
 * `serving`, `unheld TEXT` where a ring could not be copied. To a standby:
 *
 *   prepare NAMES                            + `spec`, `state` and `key`, once there is a device
 *   take-over COUNT DIED_NS REASON NAMES     + all descriptors
 *
 * NAMES is a list with commas, or `-`; DIED_NS is CLOCK_MONOTONIC at the death; REASON is one word.
 *
 * The holder never waits for another process. After its start it opens no file, writes no log and
 * allocates nothing. All its memory is locked. It blocks only in poll(), and for the moment in
 * which a new process is executed.
 */
#ifndef ISWI_HOLDER_H
#define ISWI_HOLDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define ISWI_HOLD_NAME_MAX  24
#define ISWI_HOLD_KEPT_MAX  64
#define ISWI_HOLD_NAMES_MAX (ISWI_HOLD_NAME_MAX * ISWI_HOLD_KEPT_MAX) /* all of them, in a list */
#define ISWI_HOLD_TEXT_MAX  (ISWI_HOLD_NAMES_MAX + 256)               /* bytes of a packet */
#define ISWI_HOLD_STATE     "state" /* this one and the next three are mapped and locked, too */
#define ISWI_HOLD_SPEC      "spec"
#define ISWI_HOLD_KEY       "key"
#define ISWI_HOLD_UNSAID    "unsaid"
#define ISWI_HOLD_LOG       "log" /* standard output and error from then on */
#define ISWI_HOLD_RINGS_MAX 64
#define ISWI_HOLD_PATH_MAX  512 /* bytes of a program's path, its end included */
#define ISWI_HOLD_SOCKET_FD 3   /* in a child: its end of the pair */
#define ISWI_HOLD_SPEC_FD   4   /* what the device is */
#define ISWI_HOLD_READY_FD  5   /* where the first process tells its starter; else closed */

/* ---- descriptors that are kept (keep.c) */

struct iswi_kept {
	char name[ISWI_HOLD_NAME_MAX]; /* empty: free */
	int fd;
	void *locked; /* the mapping of a file in memory, NULL without */
	size_t locked_bytes;
};

struct iswi_keep {
	struct iswi_kept kept[ISWI_HOLD_KEPT_MAX];
};

/* Takes fd; 0, -EINVAL for a bad name, -ENOSPC. */
int iswi_keep_put(struct iswi_keep *keep, const char *name, int fd);
void iswi_keep_drop(struct iswi_keep *keep, const char *name);
bool iswi_keep_has(struct iswi_keep *keep, const char *name);
/*
 * Names and descriptors to hand over: all, or those that a standby gets at once. names_out holds
 * ISWI_HOLD_NAMES_MAX bytes, fds_out ISWI_HOLD_KEPT_MAX; returns how many.
 */
uint32_t iswi_keep_list(const struct iswi_keep *keep, bool only_early, char *names_out,
			int *fds_out);

/* ---- processes (child.c) */

struct iswi_rings {
	int fds[ISWI_HOLD_RINGS_MAX];
	uint32_t count;
	int error; /* -errno of one that could not be copied */
};

struct iswi_child {
	pid_t pid; /* 0: there is none */
	int sock;  /* our end, -1 without */
	bool told; /* of a standby: to prepare */
	bool ready;
	uint64_t until_ns; /* it is killed when it has not answered by then; 0: nothing awaited */
	struct iswi_rings rings; /* copies of its */
};

struct iswi_spawn {
	char **argv; /* borrowed; argv[0] is the program's path */
	int spec_fd;
	int ready_fd; /* -1: none */
};

static inline bool iswi_child_is(const struct iswi_child *child)
{
	return child->pid > 0;
}

/* 0 or -errno. */
int iswi_child_start(struct iswi_child *child, const struct iswi_spawn *spawn);
/* SIGKILL, and forgets it: when it is reaped, its number belongs to no role. */
void iswi_child_end(struct iswi_child *child);
/* Copies a descriptor of its into its rings, or says there why not. */
void iswi_child_hold_ring(struct iswi_child *child, int fd);
void iswi_rings_close(struct iswi_rings *rings);
/* Never blocks; a child that does not listen is not told. 0 or -errno. */
int iswi_child_tell(struct iswi_child *child, const char *text, const int *fds, uint32_t count);
/*
 * Next packet: its length, 0 when there is none now, -EPIPE at the end, which closes our end.
 * text_out holds ISWI_HOLD_TEXT_MAX + 1 bytes and is terminated; *fd_out is -1 or a descriptor that
 * came along.
 */
ssize_t iswi_child_hear(struct iswi_child *child, char *text_out, int *fd_out);

/* ---- who is what (roles.c) */

enum iswi_hold_phase {
	ISWI_HOLD_STARTING,    /* the first process, before it serves */
	ISWI_HOLD_SERVING,     /* a death is followed by a take-over */
	ISWI_HOLD_ENDING,      /* a death is the end */
	ISWI_HOLD_ORPHANED,    /* no process serves; waits for a standby */
	ISWI_HOLD_TAKING_OVER, /* a successor is taking over */
	ISWI_HOLD_DONE,        /* exit_code counts */
};

struct iswi_holder {
	enum iswi_hold_phase phase;
	struct iswi_child active;  /* serves, or is taking over */
	struct iswi_child standby; /* waits for its turn */
	struct iswi_child fresh;   /* will replace the standby, by `renew` */
	struct iswi_keep keep;
	struct iswi_spawn first;                /* how the first process is started */
	struct iswi_spawn others;               /* how a standby is */
	char program[ISWI_HOLD_PATH_MAX];       /* of others, once `renew PATH` has succeeded */
	char fresh_program[ISWI_HOLD_PATH_MAX]; /* of fresh; empty: as others */
	const char *reason;                     /* why the active process ended */
	uint64_t died_ns;                       /* when the last one that served ended */
	uint64_t served_ns;                     /* since when a process serves */
	uint64_t take_over_ns;                  /* not before this: back-off */
	uint64_t spawn_ns;                      /* no new standby before this: back-off */
	uint32_t deaths;   /* in a row, without a while of service between them */
	uint32_t failures; /* of standbys, in a row */
	uint32_t take_overs;
	bool ended;        /* `ended` was said */
	bool yielding;     /* `yield` was: its death is no fault */
	int signal_wanted; /* no answer to it yet: neither `ending` nor `serving`; 0: none */
	int exit_code;
};

/* Starts the first process: 0 or -errno. */
int iswi_roles_start(struct iswi_holder *holder);
/*
 * A child has ended; it is not reaped yet, so that no other process gets its pid. by_signal: number
 * is that signal, else its exit code.
 */
void iswi_roles_died(struct iswi_holder *holder, pid_t pid, bool by_signal, int number);
/* Reads what the children say. */
void iswi_roles_hear(struct iswi_holder *holder);
/* SIGTERM or SIGINT. */
void iswi_roles_signal(struct iswi_holder *holder, int number);
/* Does what is due now; returns nanoseconds until the next thing is due, UINT64_MAX: nothing. */
uint64_t iswi_roles_step(struct iswi_holder *holder);

#endif
