/* SPDX-License-Identifier: Apache-2.0 */
/* A client of the front end far, as an agent is one: for tests of that front end alone. */
#ifndef ISW_TEST_FAR_CLIENT_H
#define ISW_TEST_FAR_CLIENT_H

#include <errno.h>
#include <linux/futex.h>
#include <linux/userfaultfd.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "far/ring.h"

#define HELLO_FDS_MAX 64u

struct far_tester {
	struct iswf_ring *ring;
	struct iswf_welcome welcome;
	int sock, ring_fd, bell[ISWF_KINDS];
};

static inline int open_uffd(void)
{
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);

	if (fd < 0)
		SKIP("userfaultfd is not allowed here");
	return fd;
}

/* Says hello on the job's socket, with these descriptors. */
static inline void send_hello(int job, const struct iswf_hello *hello, const int *fds, size_t count)
{
	union {
		char bytes[CMSG_SPACE(HELLO_FDS_MAX * sizeof(int))];
		struct cmsghdr align;
	} control = {.bytes = {0}};
	struct iovec data = {(void *)(uintptr_t)hello, sizeof(*hello)};
	struct msghdr message = {
		.msg_iov = &data,
		.msg_iovlen = 1,
		.msg_control = count > 0 ? control.bytes : NULL,
		.msg_controllen = count > 0 ? CMSG_SPACE(count * sizeof(int)) : 0,
	};
	struct cmsghdr *part = CMSG_FIRSTHDR(&message);

	CHECK(count <= HELLO_FDS_MAX);
	if (part != NULL) {
		part->cmsg_level = SOL_SOCKET;
		part->cmsg_type = SCM_RIGHTS;
		part->cmsg_len = CMSG_LEN(count * sizeof(int));
		memcpy(CMSG_DATA(part), fds, count * sizeof(int));
	}
	CHECK_EQ(sendmsg(job, &message, 0), (ssize_t)sizeof(*hello));
}

/* The usual one; what is refused is in the welcome. */
static inline void say_hello(int job, const struct iswf_hello *hello, int their_end, int uffd)
{
	const int fds[] = {their_end, uffd};

	send_hello(job, hello, fds, 2);
}

static inline void hear_welcome(struct far_tester *t)
{
	int fds[3];
	union {
		char bytes[CMSG_SPACE(sizeof(fds))];
		struct cmsghdr align;
	} control;
	struct iovec data = {&t->welcome, sizeof(t->welcome)};
	struct msghdr message = {
		.msg_iov = &data,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};

	CHECK_EQ(recvmsg(t->sock, &message, MSG_CMSG_CLOEXEC), (ssize_t)sizeof(t->welcome));
	CHECK_EQ(t->welcome.magic, ISWF_MAGIC);
	if (t->welcome.refused != 0)
		return;
	CHECK(CMSG_FIRSTHDR(&message) != NULL);
	memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fds));
	t->ring = mmap(NULL, ISWF_RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
	CHECK(t->ring != MAP_FAILED);
	t->ring_fd = fds[0];
	t->bell[0] = fds[1];
	t->bell[1] = fds[2];
}

static inline struct far_tester connect_with(int job, struct iswf_hello hello, int uffd)
{
	struct far_tester t = {.ring = NULL};
	int pair[2];

	CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	say_hello(job, &hello, pair[1], uffd);
	close(pair[1]);
	t.sock = pair[0];
	hear_welcome(&t);
	return t;
}

static inline struct far_tester connect_far(int job)
{
	int uffd = open_uffd();
	struct far_tester t = connect_with(
		job, (struct iswf_hello){.magic = ISWF_MAGIC, .version = ISWF_VERSION}, uffd);

	close(uffd);
	CHECK_EQ(t.welcome.refused, 0);
	return t;
}

static inline void leave_far(struct far_tester *t)
{
	munmap(t->ring, ISWF_RING_BYTES);
	close(t->ring_fd);
	close(t->bell[0]);
	close(t->bell[1]);
	close(t->sock);
}

static inline void far_ask(struct far_tester *t, uint32_t slot, uint32_t op, uint32_t block,
			   uint32_t first, uint32_t pages)
{
	struct iswf_slot *s = &t->ring->slots[slot];
	const uint64_t one = 1;

	s->op = op;
	s->block = block;
	s->first = first;
	s->pages = pages;
	atomic_store(&s->state, ISWF_ASKED);
	CHECK_EQ(write(t->bell[iswf_kind_of(slot)], &one, sizeof(one)), 8);
}

static inline int far_answer(struct far_tester *t, uint32_t slot)
{
	struct iswf_slot *s = &t->ring->slots[slot];
	const struct timespec most = {.tv_sec = 60};

	while (atomic_load(&s->state) != ISWF_ANSWERED)
		if (syscall(SYS_futex, &s->state, FUTEX_WAIT, ISWF_ASKED, &most, NULL, 0) != 0)
			CHECK(errno != ETIMEDOUT);
	atomic_store(&s->state, ISWF_FREE);
	return s->result;
}

static inline int far_do(struct far_tester *t, uint32_t slot, uint32_t op, uint32_t block,
			 uint32_t first, uint32_t pages)
{
	far_ask(t, slot, op, block, first, pages);
	return far_answer(t, slot);
}

#endif
