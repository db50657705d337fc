/* SPDX-License-Identifier: Apache-2.0 */
/* RDMA devices in the kernel's files: whether one is being removed, and when it has gone. */
#include "verbs/sysfs.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

static char root[] = "/tmp/isw-sysfs-XXXXXX";

static const char *at(const char *format, const char *name)
{
	static char path[2][512];
	static int which;
	char tail[256];

	which = !which;
	snprintf(tail, sizeof(tail), format, name);
	snprintf(path[which], sizeof(path[which]), "%s/%s", root, tail);
	return path[which];
}

static void add(const char *node, const char *device)
{
	FILE *file;

	CHECK_EQ(mkdir(at("infiniband_verbs/%s", node), 0700), 0);
	file = fopen(at("infiniband_verbs/%s/ibdev", node), "w");
	CHECK(file);
	fprintf(file, "%s\n", device);
	fclose(file);
	CHECK_EQ(mkdir(at("infiniband/%s", device), 0700), 0);
	CHECK_EQ(mkdir(at("infiniband/%s/ports", device), 0700), 0);
}

static void remove_node(const char *node)
{
	CHECK_EQ(unlink(at("infiniband_verbs/%s/ibdev", node)), 0);
	CHECK_EQ(rmdir(at("infiniband_verbs/%s", node)), 0);
}

static void remove_device(const char *device)
{
	CHECK_EQ(rmdir(at("infiniband/%s/ports", device)), 0);
	CHECK_EQ(rmdir(at("infiniband/%s", device)), 0);
}

static void test_node_and_device_go_one_after_the_other(void)
{
	struct iswi_sysfs sysfs;

	add("uverbs0", "rxe0");
	iswi_sysfs_open(&sysfs, root, "uverbs0");
	CHECK(!iswi_sysfs_is_leaving(&sysfs));
	CHECK(!iswi_sysfs_has_gone(&sysfs, 0));
	remove_node("uverbs0");
	CHECK(iswi_sysfs_is_leaving(&sysfs));
	CHECK(!iswi_sysfs_has_gone(&sysfs, 2)); /* the kernel is still at it */
	remove_device("rxe0");
	CHECK(iswi_sysfs_has_gone(&sysfs, 0));
	/* The next one of these names is another. */
	add("uverbs0", "rxe0");
	CHECK(iswi_sysfs_is_leaving(&sysfs));
	CHECK(iswi_sysfs_has_gone(&sysfs, 0));
	iswi_sysfs_close(&sysfs);
	remove_node("uverbs0");
	remove_device("rxe0");
}

static void test_another_name_is_no_removal(void)
{
	struct iswi_sysfs before, after;
	FILE *file;

	add("uverbs1", "mlx5_0");
	iswi_sysfs_open(&before, root, "uverbs1");
	CHECK_EQ(rename(at("infiniband/%s", "mlx5_0"), at("infiniband/%s", "rocep1")), 0);
	file = fopen(at("infiniband_verbs/%s/ibdev", "uverbs1"), "w");
	CHECK(file);
	fprintf(file, "rocep1\n");
	fclose(file);
	iswi_sysfs_open(&after, root, "uverbs1");
	CHECK(!iswi_sysfs_is_leaving(&before) && !iswi_sysfs_is_leaving(&after));
	remove_node("uverbs1");
	CHECK(!iswi_sysfs_has_gone(&before, 0) && !iswi_sysfs_has_gone(&after, 0));
	remove_device("rocep1");
	CHECK(iswi_sysfs_has_gone(&before, 0) && iswi_sysfs_has_gone(&after, 0));
	iswi_sysfs_close(&before);
	iswi_sysfs_close(&after);
}

static void test_what_nobody_knows_is_no_removal(void)
{
	struct iswi_sysfs sysfs;

	iswi_sysfs_open(&sysfs, "/nonexistent", "uverbs0");
	CHECK(!iswi_sysfs_is_leaving(&sysfs) && !iswi_sysfs_has_gone(&sysfs, 0));
	iswi_sysfs_close(&sysfs);
	/* It went between its opening and ours. */
	iswi_sysfs_open(&sysfs, root, "uverbs0");
	CHECK(iswi_sysfs_is_leaving(&sysfs) && !iswi_sysfs_has_gone(&sysfs, 0));
	iswi_sysfs_close(&sysfs);
}

int main(void)
{
	CHECK(mkdtemp(root));
	CHECK_EQ(mkdir(at("%s", "infiniband"), 0700), 0);
	CHECK_EQ(mkdir(at("%s", "infiniband_verbs"), 0700), 0);
	test_node_and_device_go_one_after_the_other();
	test_another_name_is_no_removal();
	test_what_nobody_knows_is_no_removal();
	CHECK_EQ(rmdir(at("%s", "infiniband")), 0);
	CHECK_EQ(rmdir(at("%s", "infiniband_verbs")), 0);
	CHECK_EQ(rmdir(root), 0);
	return 0;
}
