// Finds the rows that make a plan fail, within the tasks of one Spark job.
//
// Spark compiles a batch function once. The plan's input is a Gate, and an iterator of the plan can be made as often as
// one likes: a task takes its rows, evaluates the plan on all of them, on the rows that most likely made it fail, or on
// ever smaller parts, until each failing row stands alone. An evaluation costs half a millisecond where the plan is the
// JVM's alone, not a job.
//
// Compiled at run time by the compiler that Spark brings along (see isolation.py), so it is written in the Java that
// Janino knows: no generics, no lambdas.
//
// Thread: that of the task; `compute` of a Gate also runs in threads that feed Python processes.
// Invariants: (1) a row is reported only if the plan failed on that row alone. (2) a plan whose input is read outside an
// evaluation (by a broadcast of it) ends the search: the failure of a part would say nothing.

package penstock;

import java.io.File;
import java.io.IOException;
import java.lang.reflect.Field;
import java.nio.file.Files;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashSet;
import java.util.Iterator;
import java.util.List;
import java.util.Properties;
import java.util.Set;
import java.util.UUID;
import org.apache.spark.Dependency;
import org.apache.spark.Partition;
import org.apache.spark.TaskContext;
import org.apache.spark.TaskContext$;
import org.apache.spark.TaskContextImpl;
import org.apache.spark.TaskKilledException;
import org.apache.spark.api.java.function.Function2;
import org.apache.spark.memory.MemoryManager;
import org.apache.spark.memory.TaskMemoryManager;
import org.apache.spark.rdd.RDD;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.execution.RDDScanExec;
import org.apache.spark.sql.execution.SQLExecutionRDD;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.exchange.ShuffleExchangeExec;
import scala.jdk.javaapi.CollectionConverters;
import scala.runtime.AbstractPartialFunction;

// A function of the rows of one partition, for `mapPartitionsWithIndex`. The rows come `slices` times, for as many tasks.
public final class RowSearch implements Function2 {
    static final String SEARCHING = "penstock.searching"; // a local property of jobs, set once the plan is made

    final RDD[] plans; // of one row of the source or many, by way of a Gate
    final Partition[][] parts; // of each plan
    final int sources; // partitions of the source
    final int slices; // tasks for each of them
    final int shardColumn;
    final int sequenceColumn;
    final int errorColumn; // of the plans' output: a row that is not null there is a failure; -1: none
    final int rowsMax; // failing rows, after which a task stops
    final long seconds; // after which a task stops

    public RowSearch(
            SparkPlan[] plans, int sources, int slices, int shardColumn, int sequenceColumn, int errorColumn,
            int rowsMax, long seconds) throws Exception {
        this.plans = new RDD[plans.length];
        this.parts = new Partition[plans.length][];
        for (int at = 0; at < plans.length; at++) {
            this.plans[at] = rowsOf(plans[at]);
            this.parts[at] = this.plans[at].partitions();
        }
        this.sources = sources;
        this.slices = slices;
        this.shardColumn = shardColumn;
        this.sequenceColumn = sequenceColumn;
        this.errorColumn = errorColumn;
        this.rowsMax = rowsMax;
        this.seconds = seconds;
    }

    // The rows of a plan without the shuffles of its input, which has one partition: all rows that belong together are.
    static RDD rowsOf(SparkPlan plan) throws Exception {
        SparkPlan whole = (SparkPlan) plan.transformUp(new WithoutShuffles());
        RDD rows = new SQLExecutionRDD(whole.execute(), plan.conf(), SQLExecutionRDD.$lessinit$greater$default$3());
        shuffle(whole);
        resolve(rows);
        return rows;
    }

    // Does the shuffles of what the input is joined with: tasks read their output.
    static void shuffle(SparkPlan plan) throws Exception {
        if (plan instanceof ShuffleExchangeExec) { // with those below it
            scala.concurrent.Awaitable done = ((ShuffleExchangeExec) plan).mapOutputStatisticsFuture();
            scala.concurrent.Await$.MODULE$.result(done, scala.concurrent.duration.Duration$.MODULE$.Inf());
            return;
        }
        scala.collection.Iterator children = plan.children().iterator();
        while (children.hasNext()) {
            shuffle((SparkPlan) children.next());
        }
    }

    // Lets an RDD and those below it find their dependencies, as Spark does for the RDD of a job: a task cannot.
    static void resolve(RDD rdd) {
        scala.collection.Iterator all = rdd.dependencies().iterator();
        while (all.hasNext()) {
            resolve(((Dependency) all.next()).rdd());
        }
    }

    // Returns "SHARD SEQUENCE ERROR" for each failing row, or one text that begins with "?" and says why it gave up.
    public Object call(Object partition, Object source) {
        int slice = ((Integer) partition).intValue() / sources;
        List rows = new ArrayList();
        Iterator all = (Iterator) source;
        for (int number = 0; all.hasNext(); number++) {
            InternalRow row = (InternalRow) all.next();
            if ((number * 0x9E3779B9 >>> 16) % slices == slice) { // scattered: every hundredth row may be broken
                rows.add(row.copy());
            }
        }
        List failing = new ArrayList();
        try {
            new Search(this, TaskContext.get(), failing).run(rows);
        } catch (TooMany enough) { // those that were found say so
        } catch (GaveUp reason) {
            failing.clear();
            failing.add("?" + reason.getMessage());
        }
        return failing.iterator();
    }

    // One task's search.
    static final class Search {
        private final RowSearch job;
        private final TaskContextImpl context;
        private final List failing;
        private final long deadline;
        private List suspects; // rows that a Python function named in the last evaluation: most likely those that fail
        private int failed; // the plan that failed in it
        private int reached; // how many rows that plan had taken by then
        private int only; // the plan that is evaluated; -1: all
        private final Set reported = new HashSet();

        Search(RowSearch job, TaskContext context, List failing) {
            this.job = job;
            this.context = (TaskContextImpl) context;
            this.failing = failing;
            this.deadline = System.nanoTime() + job.seconds * 1000000000L;
        }

        void run(List rows) {
            boolean first = true;
            while (!rows.isEmpty()) {
                only = -1;
                String error = evaluate(rows);
                if (error == null) {
                    return;
                }
                List named = suspects;
                int plan = failed;
                int taken = reached;
                if (first && evaluate(new ArrayList()) != null) {
                    throw new GaveUp("it fails on no rows, too: " + error);
                }
                first = false;
                only = plan; // what fails in other plans is found when these rows are out
                int before = failing.size();
                List left = new ArrayList(rows);
                for (int at = 0; at < named.size(); at++) {
                    List alone = new ArrayList();
                    alone.add(named.get(at));
                    String cause = evaluate(alone);
                    if (cause != null) {
                        report((InternalRow) named.get(at), cause);
                        left.remove(named.get(at));
                    }
                }
                if (failing.size() == before) {
                    reached = taken;
                    scan(rows, error);
                    left.removeAll(reported);
                }
                rows = left;
            }
        }

        // `rows` fail with `error`: most likely the last one that was taken does, as most plans of the JVM pass rows on
        // one by one. Then the next one is among those after it. If it is not so, any may fail.
        private void scan(List rows, String error) {
            while (error != null) {
                List last = rows.subList(Math.max(reached - 1, 0), reached);
                int next = reached;
                String alone = last.isEmpty() ? null : evaluate(last);
                if (alone == null) {
                    narrow(rows, error, true);
                    return;
                }
                report((InternalRow) last.get(0), alone);
                rows = rows.subList(next, rows.size());
                error = rows.isEmpty() ? null : evaluate(rows);
            }
        }

        // `rows` fail with `error`; `itself` if they were evaluated, and not only more rows with them among these.
        private void narrow(List rows, String error, boolean itself) {
            if (rows.size() == 1) {
                String alone = itself ? error : evaluate(rows);
                if (alone == null) {
                    throw new GaveUp("a row fails with others and not alone: " + error);
                }
                report((InternalRow) rows.get(0), alone);
                return;
            }
            List low = rows.subList(0, rows.size() / 2);
            List high = rows.subList(rows.size() / 2, rows.size());
            String first = evaluate(low);
            if (first == null) {
                narrow(high, error, false);
                return;
            }
            narrow(low, first, true);
            String second = evaluate(high);
            if (second != null) {
                narrow(high, second, true);
            }
        }

        private void report(InternalRow row, String error) {
            reported.add(row);
            failing.add(row.getInt(job.shardColumn) + " " + row.getLong(job.sequenceColumn) + " " + error);
            if (failing.size() > job.rowsMax) {
                throw new TooMany();
            }
        }

        // Returns why the plans fail on these rows, or null if they do not.
        private String evaluate(List rows) {
            context.killTaskIfInterrupted();
            if (System.nanoTime() > deadline) {
                throw new GaveUp("the time is over");
            }
            suspects = new ArrayList();
            reached = 0;
            Evaluation evaluation = new Evaluation(context, rows);
            try {
                return evaluateIn(evaluation);
            } finally {
                evaluation.report.delete(); // also if nobody read it: a row of output told the failure, or a kill came
            }
        }

        private String evaluateIn(Evaluation evaluation) {
            Throwable failure = null;
            TaskContext$.MODULE$.setTaskContext(evaluation);
            try {
                String error = evaluatePlans(evaluation);
                if (error != null) {
                    return error;
                }
            } catch (Throwable thrown) {
                failure = thrown;
                reached = evaluation.taken;
            } finally {
                evaluation.end(failure);
                TaskContext$.MODULE$.setTaskContext(context);
            }
            if (failure == null) {
                return null;
            }
            context.killTaskIfInterrupted();
            String reported = evaluation.reported(suspects);
            if (reported != null) {
                return reported;
            }
            if (failure instanceof VirtualMachineError || failure instanceof InterruptedException
                    || failure instanceof TaskKilledException || !evaluation.opened) {
                throw new GaveUp(textOf(failure));
            }
            return textOf(failure);
        }

        private String evaluatePlans(Evaluation evaluation) {
            for (int plan = 0; plan < job.plans.length; plan++) {
                if (only >= 0 && plan != only) {
                    continue;
                }
                failed = plan;
                for (int part = 0; part < job.parts[plan].length; part++) {
                    evaluation.opened = false;
                    scala.collection.Iterator output = job.plans[plan].iterator(job.parts[plan][part], evaluation);
                    String error = null;
                    while (output.hasNext()) { // to the end: what is left unread ends a Python process
                        InternalRow row = (InternalRow) output.next();
                        if (error == null && job.errorColumn >= 0 && !row.isNullAt(job.errorColumn)) {
                            error = row.getUTF8String(job.errorColumn).toString();
                            reached = evaluation.taken;
                        }
                    }
                    if (error == null) {
                        error = evaluation.reported(suspects);
                    }
                    if (error != null) {
                        return error;
                    }
                }
            }
            return null;
        }
    }

    static String textOf(Throwable failure) {
        StringBuilder text = new StringBuilder();
        for (int depth = 0; failure != null && depth < 8; depth++) {
            text.append(failure.getClass().getName()).append(": ").append(failure.getMessage()).append("\n");
            failure = failure.getCause();
        }
        return text.length() > 20000 ? text.substring(0, 20000) : text.toString();
    }

    // The input of a plan: in an evaluation its rows; while the function makes the plan, all rows of the batch.
    public static final class Gate extends RDD {
        private final RDD source; // has one partition

        public Gate(RDD source) {
            super(source, scala.reflect.ClassTag$.MODULE$.apply(InternalRow.class));
            this.source = source;
        }

        public Partition[] getPartitions() {
            return source.partitions();
        }

        public scala.collection.Iterator compute(Partition split, TaskContext context) {
            if (context instanceof Evaluation) {
                Evaluation evaluation = (Evaluation) context;
                evaluation.opened = true;
                return CollectionConverters.asScala(new Taking(evaluation));
            }
            if (context.getLocalProperty(SEARCHING) != null) {
                throw new IllegalStateException("penstock: the plan reads its input in another stage");
            }
            return source.iterator(split, context);
        }
    }

    // The rows of an evaluation. A plan may take them several times, and in other threads.
    static final class Taking implements Iterator {
        private final Evaluation evaluation;
        private int taken;

        Taking(Evaluation evaluation) {
            this.evaluation = evaluation;
        }

        public boolean hasNext() {
            return taken < evaluation.rows.size();
        }

        public Object next() {
            evaluation.taken = ++taken;
            return evaluation.rows.get(taken - 1);
        }

        public void remove() {
            throw new UnsupportedOperationException();
        }
    }

    // The context of one evaluation, which ends with it: its memory and Python processes are released, and not at the end
    // of the task, as there may be thousands. Python functions that fail say so in a file (see soft_functions.py): for
    // each failure a line with the number of the row in what they were given, and the error in base64.
    static final class Evaluation extends TaskContextImpl {
        static final String REPORT = "penstock.evaluation"; // a local property: the path of that file

        final List rows;
        volatile boolean opened; // the Gate was reached
        volatile int taken; // rows that the plan took from it, the last time it did
        private final TaskContextImpl task;
        final File report;

        Evaluation(TaskContextImpl task, List rows) {
            this(task, rows, new File(System.getProperty("java.io.tmpdir"), "penstock-" + UUID.randomUUID()));
        }

        private Evaluation(TaskContextImpl task, List rows, File report) {
            super(task.stageId(), task.stageAttemptNumber(), task.partitionId(), task.taskAttemptId(),
                task.attemptNumber(), task.numPartitions(),
                new TaskMemoryManager(memoryOf(task), task.taskAttemptId()),
                properties(task.getLocalProperties(), report), null, task.taskMetrics(),
                TaskContextImpl.$lessinit$greater$default$11(), TaskContextImpl.$lessinit$greater$default$12());
            this.task = task;
            this.rows = rows;
            this.report = report;
        }

        // A task that is killed kills its evaluation: Spark ends the Python processes of what is interrupted, and a thread
        // that waits for one of them would spin until it answers.
        public boolean isInterrupted() {
            return task.isInterrupted();
        }

        public scala.Option getKillReason() {
            return task.getKillReason();
        }

        public void killTaskIfInterrupted() {
            task.killTaskIfInterrupted();
        }

        // Janino cannot load SparkEnv, which would tell it: some of its methods need classes that Spark does not bring.
        private static MemoryManager memoryOf(TaskContextImpl task) {
            try {
                Field field = TaskMemoryManager.class.getDeclaredField("memoryManager");
                field.setAccessible(true);
                return (MemoryManager) field.get(task.taskMemoryManager());
            } catch (ReflectiveOperationException changed) {
                throw new GaveUp(textOf(changed));
            }
        }

        private static Properties properties(Properties task, File report) {
            Properties all = new Properties();
            all.putAll(task);
            all.setProperty(REPORT, report.getPath());
            return all;
        }

        // Returns the first error that a Python function reported, or null, and adds the rows it named to `suspects`.
        String reported(List suspects) {
            if (!report.exists()) {
                return null;
            }
            try {
                List lines = Files.readAllLines(report.toPath());
                report.delete(); // the next plan of this evaluation begins anew
                for (int at = 0; at < lines.size(); at++) {
                    int number = Integer.parseInt(((String) lines.get(at)).split(" ")[0]);
                    if (number < rows.size() && !suspects.contains(rows.get(number))) {
                        suspects.add(rows.get(number));
                    }
                }
                return new String(Base64.getDecoder().decode(((String) lines.get(0)).split(" ")[1]), "UTF-8");
            } catch (IOException gone) {
                throw new GaveUp(textOf(gone));
            }
        }

        void end(Throwable failure) {
            try {
                if (failure != null) {
                    markTaskFailed(failure);
                }
                markTaskCompleted(scala.Option.apply(failure));
            } catch (RuntimeException ignored) { // what listeners throw changes nothing about the rows
            } finally {
                taskMemoryManager().cleanUpAllAllocatedMemory();
            }
        }
    }

    // Replaces a shuffle of a plan's input by what it shuffles.
    static final class WithoutShuffles extends AbstractPartialFunction {
        public boolean isDefinedAt(Object node) {
            if (!(node instanceof ShuffleExchangeExec)) {
                return false;
            }
            scala.collection.Iterator leaves = ((SparkPlan) node).collectLeaves().iterator();
            while (leaves.hasNext()) {
                Object leaf = leaves.next();
                if (leaf instanceof RDDScanExec && ((RDDScanExec) leaf).rdd() instanceof Gate) {
                    return true;
                }
            }
            return false;
        }

        public Object applyOrElse(Object node, scala.Function1 other) {
            return isDefinedAt(node) ? ((SparkPlan) node).children().head() : other.apply(node);
        }
    }

    static final class GaveUp extends RuntimeException {
        GaveUp(String message) {
            super(message);
        }
    }

    static final class TooMany extends RuntimeException {
    }
}
