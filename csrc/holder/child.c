/* SPDX-License-Identifier: Apache-2.0 */
/* Starting and ending the device's processes, and talking to them without ever waiting. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "holder/holder.h"

extern char **environ;

/* A child's signals are as if a shell had started it, whatever we have blocked. */
static int plain_signals(posix_spawnattr_t *attr)
{
	sigset_t none, all;
	int err;

	sigemptyset(&none);
	sigfillset(&all);
	err = posix_spawnattr_setsigmask(attr, &none);
	if (!err)
		err = posix_spawnattr_setsigdefault(attr, &all);
	if (!err)
		err = posix_spawnattr_setflags(attr,
					       POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
	return err;
}

static int plan_descriptors(posix_spawn_file_actions_t *actions, const struct iswi_spawn *spawn,
			    int sock)
{
	/* Ours are all above those numbers and close on exec (main.c). */
	int err = posix_spawn_file_actions_adddup2(actions, sock, ISWI_HOLD_SOCKET_FD);

	if (!err)
		err = posix_spawn_file_actions_adddup2(actions, spawn->spec_fd, ISWI_HOLD_SPEC_FD);
	if (!err && spawn->ready_fd >= 0)
		err = posix_spawn_file_actions_adddup2(actions, spawn->ready_fd,
						       ISWI_HOLD_READY_FD);
	return err;
}

static int spawn_with(pid_t *pid_out, const struct iswi_spawn *spawn, int sock)
{
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attr;
	int err;

	err = posix_spawn_file_actions_init(&actions);
	if (err)
		return -err;
	err = posix_spawnattr_init(&attr);
	if (err)
		goto err_actions;
	err = plain_signals(&attr);
	if (!err)
		err = plan_descriptors(&actions, spawn, sock);
	if (!err)
		err = posix_spawn(pid_out, spawn->argv[0], &actions, &attr, spawn->argv, environ);
	posix_spawnattr_destroy(&attr);
err_actions:
	posix_spawn_file_actions_destroy(&actions);
	return -err;
}

/* Above the numbers that children get. */
static int move_up(int *fd)
{
	int moved = fcntl(*fd, F_DUPFD_CLOEXEC, ISWI_HOLD_READY_FD + 1);

	if (moved < 0)
		return -errno;
	close(*fd);
	*fd = moved;
	return 0;
}

int iswi_child_start(struct iswi_child *child, const struct iswi_spawn *spawn)
{
	int pair[2];
	int err;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
		return -errno;
	err = move_up(&pair[0]);
	if (!err)
		err = move_up(&pair[1]);
	if (!err)
		err = spawn_with(&child->pid, spawn, pair[1]);
	close(pair[1]);
	if (err) {
		close(pair[0]);
		child->pid = 0;
		child->sock = -1;
		return err;
	}
	child->sock = pair[0];
	child->told = child->ready = false;
	child->until_ns = 0;
	return 0;
}

void iswi_child_end(struct iswi_child *child)
{
	if (child->pid > 0)
		kill(child->pid, SIGKILL);
	if (child->sock >= 0)
		close(child->sock);
	iswi_rings_close(&child->rings);
	*child = (struct iswi_child){.sock = -1};
}

void iswi_child_hold_ring(struct iswi_child *child, int fd)
{
	struct iswi_rings *rings = &child->rings;
	int process = (int)syscall(SYS_pidfd_open, child->pid, 0);
	int copy = process < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, process, fd, 0);
	int err = copy < 0 ? -errno : move_up(&copy);

	if (process >= 0)
		close(process);
	if (!err && rings->count == ISWI_HOLD_RINGS_MAX)
		err = -ENOSPC;
	if (!err)
		rings->fds[rings->count++] = copy;
	else if (copy >= 0)
		close(copy);
	if (err)
		rings->error = err;
}

void iswi_rings_close(struct iswi_rings *rings)
{
	for (uint32_t i = 0; i < rings->count; i++)
		close(rings->fds[i]);
	rings->count = 0;
}

int iswi_child_tell(struct iswi_child *child, const char *text, const int *fds, uint32_t count)
{
	union {
		char bytes[CMSG_SPACE(ISWI_HOLD_KEPT_MAX * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec part = {.iov_base = (void *)text, .iov_len = strlen(text)};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

	if (child->sock < 0)
		return -EPIPE;
	if (count > 0) {
		struct cmsghdr *head;

		memset(&control, 0, sizeof(control));
		message.msg_control = control.bytes;
		message.msg_controllen = CMSG_SPACE(count * sizeof(int));
		head = CMSG_FIRSTHDR(&message);
		head->cmsg_level = SOL_SOCKET;
		head->cmsg_type = SCM_RIGHTS;
		head->cmsg_len = CMSG_LEN(count * sizeof(int));
		memcpy(CMSG_DATA(head), fds, count * sizeof(int));
	}
	return sendmsg(child->sock, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* The first descriptor of a packet; more than one is nothing we asked for. */
static int take_descriptor(struct msghdr *message)
{
	struct cmsghdr *head;
	int first = -1;

	for (head = CMSG_FIRSTHDR(message); head; head = CMSG_NXTHDR(message, head)) {
		size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < count; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(head) + i * sizeof(int), sizeof(fd));
			if (first < 0)
				first = fd;
			else
				close(fd);
		}
	}
	return first;
}

ssize_t iswi_child_hear(struct iswi_child *child, char *text_out, int *fd_out)
{
	union {
		char bytes[CMSG_SPACE(4 * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec part = {.iov_base = text_out, .iov_len = ISWI_HOLD_TEXT_MAX};
	struct msghdr message = {.msg_iov = &part,
				 .msg_iovlen = 1,
				 .msg_control = control.bytes,
				 .msg_controllen = sizeof(control.bytes)};
	ssize_t got;

	*fd_out = -1;
	if (child->sock < 0)
		return -EPIPE;
	do
		got = recvmsg(child->sock, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	while (got < 0 && errno == EINTR);
	if (got < 0 && errno == EAGAIN)
		return 0;
	if (got <= 0) {
		close(child->sock);
		child->sock = -1;
		return -EPIPE;
	}
	*fd_out = take_descriptor(&message);
	if (*fd_out >= 0)
		(void)move_up(fd_out);
	text_out[got] = '\0';
	return got;
}
